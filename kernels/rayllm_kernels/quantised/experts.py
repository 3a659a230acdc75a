"""The experts' products with weights in fewer bits: `experts/experts.py` has the mathematics.

Tokens stay in their dtype; numbers of weights become floats of it in registers, exactly, and scales are applied to the
fp32 sums of their groups. What goes into the last product is rounded to x's dtype, and so is each expert's output.

With fp8_tokens, both products have e4m3 on both sides. Tokens, and what goes into the last product, which has been
rounded to x's dtype, are rounded to e4m3 (`fp8.py`), with a scale for each group of neighbours, or, tokens that meet
weights with a scale a row, for all of them (`ExpertWeight.rounding`).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checks import check_float, check_last_dim, fail
from ..dispatch import TritonModule, on_triton
from ..experts.experts import ACTS, ExpertRange, check_biases, check_onto, check_owned, check_pairs, clamped
from ..experts.pair_sum import PairSum
from .formats import E2M1
from .fp8 import Rounding, to_fp8
from .int4 import MIDDLE, half_of

_kernel = TritonModule("rayllm_kernels.quantised.experts_kernel")
_fp8_kernel = TritonModule("rayllm_kernels.quantised.fp8_experts_kernel")

Kind = Literal["fp8", "int4", "mxfp4"]
GROUPS = (32, 64, 128)  # inputs that share a scale


class ExpertWeight(NamedTuple):
    """One projection of all experts, [E, N, K].

    codes: uint8 [E, N, K] of e4m3 numbers for "fp8"; else [E, N, `half_of`(K, group)], two numbers a byte, one of each
    half of a row. scales: float32 [E, ceil(N / rows), groups], and for "mxfp4" uint8 exponents of 2 with 127 added.
    zeros: uint8 of the same shape, for "int4"; None: all are 8. inputs: K. group: inputs that share a scale, one of
    GROUPS, None for all; of "mxfp4" 32. rows: outputs that do.
    """

    kind: Kind
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    inputs: int
    group: int | None
    rows: int = 1

    @property
    def token_group(self) -> int:
        """Inputs that share a scale of what goes into the last product in fp8: the weight's, or the most there are.

        No program has a whole row of it, whose scale it could find.
        """
        return self.group or GROUPS[-1]

    @property
    def rounding(self) -> Rounding:
        """How a layer's tokens are rounded that it meets in fp8."""
        return Rounding(self.group)

    def dequantised(self, expert: int) -> Tensor:
        """float32 [N, K]."""
        codes = self.codes[expert]
        if self.kind == "fp8":
            numbers = codes.view(torch.float8_e4m3fn).float()
        else:
            numbers = torch.cat((codes & 15, codes >> 4), 1)[:, : self.inputs].float()
        if self.kind == "mxfp4":
            numbers = torch.tensor(E2M1, device=codes.device)[numbers.int()]
            return torch.ldexp(numbers, self._spread(self.scales[expert].int()) - 127)
        if self.kind == "int4":
            numbers = numbers - (MIDDLE if self.zeros is None else self._spread(self.zeros[expert].float()))
        return numbers * self._spread(self.scales[expert])

    def _spread(self, scales: Tensor) -> Tensor:
        if self.rows > 1:
            scales = scales.repeat_interleave(self.rows, 0)[: self.codes.shape[1]]
        return scales if self.group is None else scales.repeat_interleave(self.group, 1)[:, : self.inputs]


class QuantisedProjections(NamedTuple):
    """The arguments of `experts_quantised` that are of a layer."""

    gate_up: ExpertWeight
    down: ExpertWeight
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    act: str
    clamp: tuple[float, float] | None


def experts_quantised(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: ExpertWeight,
    down: ExpertWeight,
    act: str = "silu",
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    clamp: tuple[float, float] | None = None,
    owned: ExpertRange | None = None,
    onto: Tensor | None = None,
    fp8_tokens: bool = False,
    summed: bool = True,
    deterministic: bool = False,
) -> Tensor | PairSum:
    """As `experts`, gate_up [E, 2 * I, H] and down [E, H, I] being in fewer bits.

    fp8_tokens: tokens meet the weights, which are in fp8, as fp8 too. Needs a GPU with `Hardware.has_e4m3`, or the CPU.
    deterministic: each row depends on its row of x, on its experts and on the weights alone, to the bit.
    """
    _check(x, weights, experts, gate_up, down, act)
    check_owned(owned, gate_up.codes.shape[0])
    check_biases(x, gate_up_bias, down_bias, (gate_up.codes.shape[:2], down.codes.shape[:2]))
    check_onto(onto, x)
    projections = QuantisedProjections(gate_up, down, gate_up_bias, down_bias, act, clamp)
    if fp8_tokens and not gate_up.kind == down.kind == "fp8":
        fail("fp8_tokens", "needs weights in fp8", f"{gate_up.kind} and {down.kind}")
    if on_triton(x):
        kernel = _fp8_kernel if fp8_tokens else _kernel
        y = kernel.experts(x, weights, experts, projections, owned, onto, deterministic=deterministic)
    else:
        outputs = _experts(x, experts, projections, owned, fp8_tokens=fp8_tokens, deterministic=deterministic)
        y = PairSum(outputs, weights, onto)
    return y.total() if summed and isinstance(y, PairSum) else y


def _experts(
    x: Tensor,
    experts: Tensor,
    projections: QuantisedProjections,
    owned: ExpertRange | None,
    *,
    fp8_tokens: bool,
    deterministic: bool,
) -> Tensor:
    """The outputs of all pairs, expert by expert, with all of its tokens at once, or, if deterministic, one by one."""
    gate_up, down, gate_up_bias, down_bias, name, clamp = projections

    def numbers(tokens: Tensor, rounding: Rounding) -> Tensor:
        return to_fp8(tokens, rounding).dequantised() if fp8_tokens else tokens.float()

    act, chosen, pair_expert = ACTS[name], experts.shape[1], experts.flatten()
    out, wide = x.new_zeros(pair_expert.shape[0], x.shape[1]), numbers(x, gate_up.rounding)
    inner_rounding = Rounding(down.token_group)
    if owned is not None:
        pair_expert = pair_expert - owned.first
    for expert in pair_expert.unique().tolist():
        if not 0 <= expert < down.codes.shape[0]:
            continue
        first, last = gate_up.dequantised(expert), down.dequantised(expert)
        biases = [None if bias is None else bias[expert].float() for bias in (gate_up_bias, down_bias)]
        pairs = (pair_expert == expert).nonzero().squeeze(1)
        for some in pairs.split(1) if deterministic else (pairs,):
            gate, up = F.linear(wide[some // chosen], first, biases[0]).chunk(2, dim=-1)
            inner = act(gate, up) if clamp is None else clamped(gate, up, *clamp)
            out[some] = F.linear(numbers(inner.to(x.dtype), inner_rounding), last, biases[1]).to(x.dtype)
    return out


def _check(x: Tensor, weights: Tensor, experts: Tensor, gate_up: ExpertWeight, down: ExpertWeight, act: str) -> None:
    if act not in ACTS:
        fail("act", f"must be one of {', '.join(ACTS)}", act)
    if x.dim() != 2:
        fail("x", "must be [T, H]", x.shape)
    check_float(x, "x")
    check_last_dim(x, "x")
    count, rows = gate_up.codes.shape[:2]
    if rows % 2:
        fail("gate_up", "must have an even number of rows, gate and up", rows)
    _check_weight(gate_up, "gate_up", count, rows, x.shape[1])
    _check_weight(down, "down", count, x.shape[1], rows // 2)
    check_pairs(x, weights, experts)


def _check_weight(weight: ExpertWeight, argument: str, count: int, outputs: int, inputs: int) -> None:
    kind, codes, scales, zeros, own_inputs, group, rows = weight
    if own_inputs != inputs:
        fail(argument, f"must have {inputs} inputs", own_inputs)
    if group is not None and group not in GROUPS:
        fail(f"{argument}.group", f"must be one of {GROUPS}", group)
    if kind == "mxfp4" and group != 32:
        fail(f"{argument}.group", "must be 32 for mxfp4", group)
    shape = (count, outputs, inputs if kind == "fp8" else half_of(inputs, group))
    if codes.shape != shape or codes.dtype != torch.uint8 or not codes.is_contiguous():
        fail(f"{argument}.codes", f"must be contiguous uint8 of shape {shape}", (codes.dtype, *codes.shape))
    shape = (count, -(-outputs // rows), 1 if group is None else -(-inputs // group))
    wanted = torch.uint8 if kind == "mxfp4" else torch.float32
    for name, tensor, dtype in (("scales", scales, wanted), ("zeros", zeros, torch.uint8)):
        if tensor is not None and (tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous()):
            fail(f"{argument}.{name}", f"must be contiguous {dtype} of shape {shape}", (tensor.dtype, *tensor.shape))
