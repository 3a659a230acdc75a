"""Attention over the paged KV cache: decodes, prefill chunks, and how a decode step's work is cut."""
