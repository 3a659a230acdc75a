"""Kernels of rayllm: Triton (and Gluon) kernels for NVIDIA GPUs, each beside its reference in plain PyTorch.

`rayllm_kernels.ops` is what the engine calls. A module named after an op holds the op itself: its contract, the checks
of its arguments and its reference, which is also how it is computed on CPUs. The module of the same name with `_kernel`
at the end holds the Triton kernel and the function that launches it. Only the `_kernel` modules (and what only they
use) import triton, and they are imported when the first CUDA tensor comes: an install for CPUs needs no triton.

attention/    attention over the paged KV cache: decodes, prefill chunks, and how a decode step's work is cut
gated_delta/  layers with a recurrent state: the gated delta rule, the convolution before it, the norm behind it
linear/       projections: which kernel takes which shape, and the kernels
experts/      mixtures of experts: which experts a token goes through, and their products
quantised/    weights in fewer bits: formats, products, and the rounding of tokens
lora/         low-rank adapters, each token its own
norm/         RMSNorm, the gated activation, and what lies between the qkv projection and attention: rotary positions
sampling/     drawing tokens, truncation, penalties, log-probabilities, and the noise that draws use
cache/        the KV cache and its formats, writing to it, copying its blocks, the inputs of a decode step
collectives/  all-reduce and all-gather between the GPUs of one host
"""
