"""The Triton kernel of `soft_cap_`: one program caps a tile of all logits.

    y = cap * tanh(x / cap)

x, y: the same contiguous numbers of fp32, fp16 or bf16.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..compile_ahead import launch
from ..dependent_launch import wait_for_predecessor
from ..device import hardware

TILE = 2048
# Up to here the series of tanh, of three terms, is more exact in fp32 than the difference of its exponentials.
SMALL = tl.constexpr(0.1)


@triton.jit
def _tanh(x):
    power = tl.exp2(x * 2.8853900817779268)  # e^2x
    square = x * x
    series = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0)))
    return tl.where(tl.abs(x) < SMALL, series, 1.0 - 2.0 / (1.0 + power))


@triton.jit(do_not_specialize=["count"])
def _soft_cap_kernel(logits_ptr, count, cap, SIZE: tl.constexpr, OVERLAP: tl.constexpr):
    wait_for_predecessor(OVERLAP)
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    x = tl.load(logits_ptr + at, mask=at < count, other=0.0)
    y = cap * _tanh(x.to(tl.float32) / cap)
    tl.store(logits_ptr + at, y.to(x.dtype), mask=at < count)


def soft_cap_(logits: Tensor, cap: float) -> None:
    """Cap checked logits."""
    count = logits.numel()
    if not count:
        return
    overlap = hardware(logits.device).can_overlap
    launch(_soft_cap_kernel, (triton.cdiv(count, TILE),))(
        logits, count, cap, SIZE=TILE, OVERLAP=overlap, num_warps=4, launch_pdl=overlap
    )
