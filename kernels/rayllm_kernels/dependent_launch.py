"""Programmatic dependent launch: a kernel starts while the one before it in the stream still runs.

A small kernel spends much of its time starting and filling the memory pipeline. Launched with `launch_pdl`, it may do
so, and read what no other kernel writes (the weights), before its predecessor is done; `wait_for_predecessor` then
holds it until all earlier results are visible.

Every program waits exactly once, before it reads a result and before it writes anything. It lets the next kernel start
after that; only a norm does so before, so a product may read its weights while the one before the norm still runs. What
is read early may have been written by any kernel that does not itself let the next one start early.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@cache
def can_overlap(device: torch.device) -> bool:
    """Whether kernels of this device may be launched so: NVIDIA GPUs of compute capability 9.0 and above."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def wait_for_predecessor(OVERLAP: tl.constexpr):
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
