"""Low-rank adapters of projections (LoRA: Hu et al., 2021), of several adapters in one batch.

y_t += B_s A_s x_t,   s = slots[t]

for the tokens t that have an adapter: s is the slot in which its weights are, and B_s has the factor alpha / r already.
A token without one has slot -1. Several projections of one input, such as those of query, key and value, are one group:
each has an A of its own, and its own part of y.

Two launches a group: the first one shrinks x to the adapters' ranks, in parts of the inputs, the second one adds these
parts up, expands and adds to y. Both read the slots on the device, so they can be captured in a CUDA graph, and what a
token gets does not depend on the other tokens of the batch. Programs of slots and ranks that no token has end at once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import check_like, check_rows, check_vectors, fail
from ..dispatch import TritonModule, on_triton

_kernel = TritonModule("rayllm_kernels.lora.lora_kernel")


class AdapterSlots(NamedTuple):
    """The adapters' weights of one group of P projections, in S slots of rank R at most.

    a: [S, P, R, in]. b: [N, S, R], the projections' rows one after the other. ranks: [S, P] int32, of each slot's
    adapter; 0 where it has none for the projection. What lies beyond a rank has no effect, but in b it must be finite,
    and so must be all that other tokens' slots have there.
    rows: outputs of each projection, N in sum.
    """

    a: Tensor
    b: Tensor
    ranks: Tensor
    rows: tuple[int, ...]


class TokenAdapters(NamedTuple):
    """Which adapter each token has, and the adapters' weights of one group."""

    slots: Tensor  # [T] int32, -1 without one
    weights: AdapterSlots


def add_adapters(x: Tensor, y: Tensor, slots: Tensor, weights: AdapterSlots, *, deterministic: bool = False) -> None:
    """Add each token's adapter's product to y [T, N], in place. x: [T, in], slots: [T] int32.

    The shrunk input is rounded to x's dtype, the product is fp32 and rounded after it was added to y.
    deterministic: a token's result does not depend on the others, to the bit, either; here only CPUs differ.
    """
    if x.dim() != 2 or y.dim() != 2 or x.shape[0] != y.shape[0]:
        fail("x", "must be [T, in] and y [T, N]", (*x.shape, *y.shape))
    check_rows(x, "x")
    check_rows(y, "y")
    check_like(y, "y", x, "x")
    check_adapters(x, y.shape[1], TokenAdapters(slots, weights))
    if not y.numel():
        return
    if on_triton(x):
        _kernel.add_adapters(x, y, slots, weights)
        return
    ranks = weights.ranks.tolist()
    for slot in slots.unique().tolist():
        if slot < 0:
            continue
        rows = (slots == slot).nonzero()[:, 0]
        # A row at a time in the deterministic mode: the order of a product's sums follows its shape.
        for part in rows.split(1) if deterministic else [rows]:
            inputs, first = x[part], 0
            for number, (rank, width) in enumerate(zip(ranks[slot], weights.rows, strict=True)):
                if rank:
                    shrunk = inputs @ weights.a[slot, number, :rank].t()
                    b = weights.b[first : first + width, slot, :rank]
                    added = y[part, first : first + width].float() + shrunk.float() @ b.float().t()
                    y[part, first : first + width] = added.to(y.dtype)
                first += width


def check_adapters(x: Tensor, outputs: int, adapters: TokenAdapters) -> None:
    """Raise ValueError where they are not for x [T, in] and so many outputs."""
    slots, (a, b, ranks, rows) = adapters
    check_vectors(x.shape[0], torch.int32, x.device, slots=slots)
    if a.dim() != 4 or a.shape[1] != len(rows) or a.shape[3] != x.shape[1] or not a.is_contiguous():
        fail("a", f"must be [S, {len(rows)}, R, {x.shape[1]}], contiguous", a.shape)
    if b.shape != (sum(rows), a.shape[0], a.shape[2]) or b.shape[0] != outputs or not b.is_contiguous():
        fail("b", f"must be [{outputs}, {a.shape[0]}, {a.shape[2]}], contiguous", b.shape)
    check_like(a, "a", x, "x")
    check_like(b, "b", x, "x")
    if ranks.shape != a.shape[:2] or ranks.dtype != torch.int32 or not ranks.is_contiguous():
        fail("ranks", f"must be {tuple(a.shape[:2])} int32", (ranks.dtype, *ranks.shape))
