"""What crosses the borders between parts: requests, plans, results and outputs, and the messages of the sockets."""
