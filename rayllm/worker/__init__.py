"""One rank: its model, its KV pools, the persistent batch, and the captured graphs of steps."""
