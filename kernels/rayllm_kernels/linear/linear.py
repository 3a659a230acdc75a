"""Projections of one step's tokens.

Few tokens leave the time to the weights, which must be read once whatever the number: this package's kernels read them
faster than the vendor's matrix product. For more tokens that product is the fastest, followed by the unfused kernels.
`plans.py` says which shapes go where.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checks import (
    check_last_dim,
    check_like,
    check_norm_weight,
    check_out,
    check_residual,
    check_rows,
    check_vectors,
    fail,
)
from ..device import hardware
from ..dispatch import TritonModule, on_triton
from ..lora.lora import TokenAdapters, add_adapters, check_adapters
from ..norm.act_and_mul import act_and_mul, kind_of
from ..norm.rms_norm import fused_add_rms_norm, rms_norm
from . import plans

_rows_kernel = TritonModule("rayllm_kernels.linear.rows_kernel")
_rows_adapters = TritonModule("rayllm_kernels.linear.rows_adapters")
_tiles_kernel = TritonModule("rayllm_kernels.linear.tiles_kernel")
_hopper_kernel = TritonModule("rayllm_kernels.linear.hopper_kernel")
_gated_kernel = TritonModule("rayllm_kernels.linear.gated_hopper_kernel")
_invariant_kernel = TritonModule("rayllm_kernels.linear.invariant_kernel")

NO_NORM = (None, None, 0.0)


def prepare(device: torch.device) -> None:
    """Allocate what kernels keep between calls on `device`, which the first one that needs it does otherwise.

    To be called before a pool of memory is in use that captured graphs share with others: what is allocated from it
    after a capture may lie where the graph, when it is replayed, puts its temporary tensors.
    """
    device = torch.empty(0, device=device).device  # with its index, as tensors name it
    if hardware(device).is_hopper:
        _hopper_kernel.flags(device)
    if device.type == "cuda":
        _rows_adapters.room(device)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
    adapters: TokenAdapters | None = None,
) -> Tensor:
    """x W^T + bias -> [T, out], a new tensor or the contiguous `out`; made for few tokens and right for any number.

    x: [T, in], weight: [out, in], last dimensions contiguous; bias: [out]. Sums are fp32, rounded once, in an order
    that depends on shapes alone: equal calls give equal results. adapters: what they give each token is added, by the
    kernels for few tokens before the sum is rounded, and else by `add_adapters`.
    """
    _check_projection(x, weight, bias, adapters)
    check_out(out, torch.Size((x.shape[0], weight.shape[0])), x, "x")
    if out is not None and not out.is_contiguous():
        fail("out", "must be contiguous", out.stride())
    y = _project(x, weight, bias, out, None, adapters) if on_triton(x) else None
    if y is not None:
        return y
    if adapters is not None:
        y = linear(x, weight, bias, out=out)
        add_adapters(x, y, *adapters)
        return y
    if out is None:
        return F.linear(x, weight, bias)
    return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)


def linear_invariant(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias -> a new tensor [T, out], each row of which depends on its row of x and on W alone, to the bit.

    So a row is the same in any batch, at any place in it. Arguments as for `linear`. Slower than that; on the CPU,
    where rows are multiplied one by one, much slower for many tokens.
    """
    _check_projection(x, weight, bias)
    if on_triton(x):
        return _invariant_kernel.linear_invariant(x, weight, bias)
    # A row at a time: the order of a product's sums follows its shape, and here all have the same. Each row is a copy,
    # because the order may follow the alignment too.
    y = x.new_empty(x.shape[0], weight.shape[0])
    for source, target in zip(x.split(1), y.split(1), strict=True):
        target.copy_(F.linear(source.clone(), weight, bias))
    return y


def linear_wide(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, deterministic: bool = False) -> Tensor:
    """x W^T + bias -> a new tensor [T, out] in fp32, not rounded to x's dtype; arguments as for `linear`.

    deterministic: no row depends on the others to the bit, as for `linear_invariant`; slower for very few tokens.
    """
    _check_projection(x, weight, bias)
    if on_triton(x):
        if not deterministic and plans.rows_take(x, weight, norm=False):
            y = torch.empty((x.shape[0], weight.shape[0]), dtype=torch.float32, device=x.device)
            tiles = plans.choose_rows(*x.shape, gated=False, norm=False)
            return _rows_kernel.linear_rows(x, weight, tiles, bias, NO_NORM, None, y)[0]
        return _invariant_kernel.linear_invariant(x, weight, bias, wide=True)
    wide = x.float(), weight.float(), None if bias is None else bias.float()
    return linear_invariant(*wide) if deterministic else F.linear(*wide)


def linear_act_mul(x: Tensor, weight: Tensor, act: str, *, adapters: TokenAdapters | None = None) -> Tensor:
    """act(x G^T) * (x U^T) -> a new tensor [T, out], where weight is [2 * out, in], the rows of G before those of U.

    x: [T, in], last dimensions contiguous. act: as for `act_and_mul`. adapters: as for `linear`, of the product before
    the activation. By this package's kernels everything is fp32 and rounded once; elsewhere, and on the CPU, it is
    `act_and_mul` of the rounded product.
    """
    _check_projection(x, weight, None, adapters)
    _check_gated(weight)
    y = _project(x, weight, None, None, act, adapters) if on_triton(x) else None
    if y is not None:
        return y
    return act_and_mul(F.linear(x, weight) if adapters is None else linear(x, weight, adapters=adapters), act)


def add_rms_norm_linear(
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    act: str | None = None,
    adapters: TokenAdapters | None = None,
) -> tuple[Tensor, Tensor]:
    """(norm(total) W^T + bias, total), total = x + residual rounded to x's dtype; x itself if residual is None.

    x, residual: [T, in]; norm_weight: [in]; the rest as for `linear` and `fused_add_rms_norm`. For very few tokens one
    launch, in which the norm is not rounded before the product. act: the first is `linear_act_mul`(norm(total),
    weight, act) instead; there is no bias.
    """
    if act is not None:
        _check_gated(weight)
    _check_projection(x, weight, bias, adapters)
    check_norm_weight(norm_weight, "norm_weight", x.shape[1], x)
    if residual is not None:
        check_residual(residual, x)
    if on_triton(x) and plans.rows_take(x, weight, norm=True, adapters=adapters):
        tiles = plans.choose_rows(x.shape[0], x.shape[1], gated=act is not None, norm=True)
        kind, norm = None if act is None else kind_of(act), (residual, norm_weight, eps)
        return _rows_kernel.linear_rows(x, weight, tiles, bias, norm, kind, None, adapters)
    if residual is None:
        y, total = rms_norm(x, norm_weight, eps), x
    else:
        y, total = fused_add_rms_norm(x, residual, norm_weight, eps)
    if act is None:
        return linear(y, weight, bias, adapters=adapters), total
    return linear_act_mul(y, weight, act, adapters=adapters), total


def _project(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None, act: str | None, adapters: TokenAdapters | None
) -> Tensor | None:
    """The projection of checked arguments by one of this package's kernels, None where those are not the fastest.

    act: weight holds gate and up, and the result is act(gate) * up; None for one of its own. With adapters, None where
    they must be added apart.
    """
    gated, kind = act is not None, None if act is None else kind_of(act)
    (tokens, inputs), rows, gpu = x.shape, weight.shape[0], hardware(x.device)
    if plans.rows_take(x, weight, norm=False, adapters=adapters):
        row_tiles = plans.choose_rows(tokens, inputs, gated=gated, norm=False)
        return _rows_kernel.linear_rows(x, weight, row_tiles, bias, NO_NORM, kind, out, adapters)[0]
    if gpu.is_hopper and plans.hopper_takes(x, weight, gated):
        adapted = adapters is not None
        plan = plans.plan_hopper(tokens, rows, inputs, gated, gpu.multiprocessors, adapted=adapted)
        if plan is not None and (adapters is None or plans.hopper_takes_adapters(tokens, adapters, gated)):
            return _hopper_kernel.linear_hopper(x, weight, plan, bias, act=kind, out=out, adapters=adapters)
        if adapters is not None:
            return None
        consumers = plans.plan_gated(tokens, rows, inputs, gpu.multiprocessors) if gated else None
        if consumers is not None:
            return _gated_kernel.linear_gated_hopper(x, weight, consumers, gpu.multiprocessors, kind)
    if adapters is not None:
        return None
    few = 0 < tokens <= plans.MAX_TILES_TOKENS and rows > 0 and inputs > 0
    if few and x.dtype != torch.float32 and gpu.shared_memory >= plans.MIN_SHARED_MEMORY:
        tiles = plans.choose_tiles(tokens, rows // 2 if gated else rows, gated, gpu.multiprocessors)
        return _tiles_kernel.linear_tiles(x, weight, tiles, bias, act=kind, out=out)
    return None


def _check_projection(x: Tensor, weight: Tensor, bias: Tensor | None, adapters: TokenAdapters | None = None) -> None:
    if x.dim() != 2:
        fail("x", "must be [T, in]", x.shape)
    check_rows(x, "x")
    if weight.dim() != 2 or weight.shape[1] != x.shape[1]:
        fail("weight", f"must be [out, {x.shape[1]}]", weight.shape)
    check_like(weight, "weight", x, "x")
    check_last_dim(weight, "weight")
    if bias is not None:
        check_vectors(weight.shape[0], x.dtype, x.device, bias=bias)
    if adapters is not None:
        check_adapters(x, weight.shape[0], adapters)


def _check_gated(weight: Tensor) -> None:
    if weight.shape[0] % 2 != 0:
        fail("weight", "must have an even number of rows, gate and up", weight.shape)
