"""Kernels of rayllm: one Triton kernel a file, each with a torch reference of the same signature.

`rayllm_kernels.ops` is the way in: it picks the Triton kernel for CUDA tensors and the reference for CPU tensors.
Importing this package or `ops` imports torch and no triton, so a CPU-only install works without it.
"""
