"""The KV cache and its formats, writing to it, copying its blocks, and the inputs of a decode step."""
