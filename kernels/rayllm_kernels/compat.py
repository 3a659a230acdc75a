"""The one place for what third parties rename or do not document; `tests/kernels/test_compat.py` holds their contracts.

Gluon is public but experimental, and renames functions between the versions of Triton that this package supports. The
rest of what this package uses of Triton and PyTorch is documented; the tests cover what of it matters most, too.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

# (descriptor, coordinates, barrier, destination in shared memory): start a tensor copy. Triton 3.9 renamed it.
copy_async = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
# (): wait for all threads of the warps that run this code. Triton 3.9 renamed it.
thread_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
# (shared memory, dtype, shape, layout): the same bytes as another tensor. Triton 3.9 renamed it.
reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret
