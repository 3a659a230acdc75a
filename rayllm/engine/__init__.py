"""The step loop, the thread that runs it, and the sockets between an engine and those that send it requests."""
