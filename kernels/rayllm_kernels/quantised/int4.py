"""Products with weights of 4 bits: one layout for all formats that checkpoints have, made when they are loaded.

    w[n, k] = scale[n, group of k] * (number[n, k] - zero[n, group of k]),   y = x W^T + bias

A row's numbers are cut in two halves of whole groups. A byte has one number of each half, in its lower and its upper
four bits, so that a tile of bytes is two tiles of weights, each of neighbouring inputs, and nothing is shuffled. Scales
and zero points of a group lie side by side for all rows: a tile has many rows and few groups.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checks import check_rows, check_vectors, fail
from ..device import hardware
from ..dispatch import TritonModule, on_triton
from ..linear.plans import HopperPlan
from ..norm.act_and_mul import act_and_mul, kind_of
from ..norm.rms_norm import check_norm, normed
from . import plans
from .dequantised_product import linear_dequantised
from .formats import Numbers

_product_kernel = TritonModule("rayllm_kernels.quantised.int4_product_kernel")
_hopper_kernel = TritonModule("rayllm_kernels.quantised.int4_hopper_kernel")
_dequantise_kernel = TritonModule("rayllm_kernels.quantised.dequantise_kernel")
_vector_kernel = TritonModule("rayllm_kernels.quantised.int4_vector_kernel")
_stream_kernel = TritonModule("rayllm_kernels.quantised.int4_stream_kernel")

MIDDLE = 8  # the zero point of symmetric weights
NO_NORM = (None, None, 0.0)


class Int4Weight(NamedTuple):
    """A weight [N, K] in 4 bits.

    codes: uint8 [N, `half_of`(K, group)]. scales: float32 [groups, N]. zeros: uint8 of the same shape; None: all are
    8. inputs: K. group: inputs that share a scale, a multiple of 32; None is all of them.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    inputs: int
    group: int | None

    def dequantised(self) -> Tensor:
        """float32 [N, K]."""
        numbers = torch.cat((self.codes & 15, self.codes >> 4), 1)[:, : self.inputs].float()
        zeros = float(MIDDLE) if self.zeros is None else self._spread(self.zeros.float())
        return (numbers - zeros) * self._spread(self.scales)

    def _spread(self, of_groups: Tensor) -> Tensor:
        return of_groups.T if self.group is None else of_groups.T.repeat_interleave(self.group, 1)[:, : self.inputs]


def half_of(inputs: int, group: int | None) -> int:
    """Inputs of each half of a row, the second being filled up."""
    step = 1 if group is None else group
    return -(-inputs // (2 * step)) * step


def pack_int4(numbers: Numbers, group: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """(codes as of `Int4Weight`, scales and zeros [N, groups]) of numbers from 0 to 15 whose groups are `group`
    neighbours each.
    """
    inputs, half = numbers.values.shape[1], half_of(numbers.values.shape[1], group)
    values = F.pad(numbers.values.to(torch.uint8), (0, 2 * half - inputs))
    firsts = numbers.groups[:: group or max(inputs, 1)]
    assert numbers.zeros is not None
    return values[:, :half] | values[:, half:] << 4, numbers.scales.float()[:, firsts], numbers.zeros[:, firsts]


def linear_int4(x: Tensor, weight: Int4Weight, bias: Tensor | None = None, *, deterministic: bool = False) -> Tensor:
    """x W^T + bias -> a new tensor [T, N] of x's dtype; x [T, K], last dimension contiguous, bias [N].

    Sums are fp32 and rounded once. What is multiplied are the numbers less their zero points, which are exact in any
    dtype, and scales are applied to the sums of groups; of a single token on GPUs the numbers, and zero points are
    taken off the sums. On Hopper GPUs, and of many tokens on all, weights are rounded to x's dtype before they are
    multiplied: each is off by 2 u at most, u being the dtype's unit roundoff. deterministic: each row depends on its
    row of x and on W alone, to the bit, and no weight is rounded.
    """
    _check(x, weight, bias)
    if on_triton(x):
        if not deterministic and (found := _one_token(x, NO_NORM, weight, bias, None)) is not None:
            return found[0]
        if not deterministic and plans.dequantised_takes(x, weight.codes.shape[0], bits=4):
            dequantise = partial(_dequantise_kernel.dequantise, weight)
            return linear_dequantised(x, weight.codes.shape[0], bias, dequantise)
        if not deterministic and (plan := _plan(x, weight, gated=False)) is not None:
            return _hopper_kernel.linear_int4_hopper(x, weight, plan, bias)
        return _product_kernel.linear_int4(x, weight, bias, deterministic)
    wide, bias = weight.dequantised(), None if bias is None else bias.float()
    if not deterministic or x.shape[0] < 2:
        return F.linear(x.float(), wide, bias).to(x.dtype)
    rows = [F.linear(row.clone(), wide, bias) for row in x.float().split(1)]  # see `linear_invariant`
    return torch.cat(rows).to(x.dtype)


def fused_linear_int4(
    x: Tensor,
    weight: Int4Weight,
    bias: Tensor | None = None,
    *,
    norm: tuple[Tensor, float] | None = None,
    residual: Tensor | None = None,
    act: str | None = None,
) -> tuple[Tensor, Tensor]:
    """(`linear_int4` of n, total), where n is the norm of total = x + residual, or x, with which total is x.

    norm: (weight, eps), None for none. residual: None for none, and without a norm. act: weight is [2 N, K], the rows
    of gate before those of up; the product is act(gate) * up then, and has no bias. On GPUs a single token takes one
    launch, in which nothing is rounded in between, on Hopper GPUs but n to 16 bits.
    """
    _check(x, weight, bias)
    if act is not None and (weight.codes.shape[0] % 2 or bias is not None):
        fail("weight", "must have an even number of rows, gate and up, and no bias", weight.codes.shape)
    check_norm(x, norm, residual)
    before = NO_NORM if norm is None else (residual, *norm)
    if on_triton(x) and (found := _one_token(x, before, weight, bias, act)) is not None:
        return found
    x, total = normed(x, norm, residual)
    if act is not None and on_triton(x) and not plans.dequantised_takes(x, weight.codes.shape[0], bits=4):
        plan = _plan(x, weight, gated=True)
        if plan is not None:
            return _hopper_kernel.linear_int4_hopper(x, weight, plan, act=kind_of(act)), total
    y = linear_int4(x, weight, bias)
    return (y if act is None else act_and_mul(y, act)), total


def _one_token(
    x: Tensor,
    before: tuple[Tensor | None, Tensor | None, float],
    weight: Int4Weight,
    bias: Tensor | None,
    act: str | None,
) -> tuple[Tensor, Tensor] | None:
    """`fused_linear_int4` by a kernel for single tokens, None where there is none. before: residual and norm."""
    kind = None if act is None else kind_of(act)
    if plans.int4_stream_takes(x, weight.codes, hardware(x.device)):
        return _stream_kernel.linear_int4_stream(x, before, weight, bias, kind)
    if plans.int4_vector_takes(x, weight.codes):
        return _vector_kernel.linear_int4_vector(x, before, weight, bias, kind)
    return None


def _plan(x: Tensor, weight: Int4Weight, *, gated: bool) -> HopperPlan | None:
    return plans.plan_int4_hopper(x, weight.codes, weight.group, hardware(x.device), gated=gated)


def _check(x: Tensor, weight: Int4Weight, bias: Tensor | None) -> None:
    codes, scales, zeros, inputs, group = weight
    if x.dim() != 2 or x.shape[1] != inputs:
        fail("x", f"must be [T, {inputs}]", x.shape)
    check_rows(x, "x")
    if group is not None and (group < 1 or group % plans.LEAST_INT4_GROUP):
        fail("weight.group", f"must be a multiple of {plans.LEAST_INT4_GROUP}", group)
    if codes.dim() != 2 or codes.shape[1] != half_of(inputs, group) or codes.dtype != torch.uint8:
        fail("weight.codes", f"must be uint8 [N, {half_of(inputs, group)}]", (codes.dtype, *codes.shape))
    shape = (1 if group is None else -(-inputs // group), codes.shape[0])
    for argument, tensor, dtype in (("scales", scales, torch.float32), ("zeros", zeros, torch.uint8)):
        if tensor is not None and (tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous()):
            fail(f"weight.{argument}", f"must be contiguous {dtype} of shape {shape}", (tensor.dtype, *tensor.shape))
    if not codes.is_contiguous():
        fail("weight.codes", "must be contiguous", codes.stride())
    if bias is not None:
        check_vectors(codes.shape[0], x.dtype, x.device, bias=bias)
