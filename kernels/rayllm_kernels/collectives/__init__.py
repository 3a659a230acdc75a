"""All-reduce and all-gather between the GPUs of one host."""
