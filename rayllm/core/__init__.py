"""The scheduler and the KV blocks that it hands out. Nothing here knows torch, Ray or the time of day."""
