"""The experts' products: each token's output is the weighted sum of the MLPs that its router chose.

y[t] = onto[t] + sum over i of weights[t, i] * round(D_e act(G_e x[t], U_e x[t])),   e = experts[t, i]

with a bias after each of G, U and D, if there are any.

Each expert's output is rounded to x's dtype before it is weighted. The sum is fp32, in the order of i, rounded once.
Where weights are there of some of the experts alone, the sum is over those.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checks import check_float, check_last_dim, check_like, fail
from ..dispatch import TritonModule, on_triton
from .pair_sum import PairSum

_kernel = TritonModule("rayllm_kernels.experts.products_kernel")


class ExpertRange(NamedTuple):
    """Which experts the weights are of: those from `first` on, of `total`."""

    first: int
    total: int


Act = Callable[[Tensor, Tensor], Tensor]


def _gated(act: Callable[[Tensor], Tensor]) -> Act:
    return lambda gate, up: act(gate) * up


def _tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


# (gate, up) -> what goes into the last product; by the names of config.json.
ACTS: dict[str, Act] = {
    **dict.fromkeys(("silu", "swish"), _gated(F.silu)),
    "gelu": _gated(F.gelu),
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), _gated(_tanh_gelu)),
}


class Projections(NamedTuple):
    """The arguments of `experts` that are of a layer."""

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    act: str
    clamp: tuple[float, float] | None


def clamped(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


def experts(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    act: str = "silu",
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    clamp: tuple[float, float] | None = None,
    owned: ExpertRange | None = None,
    onto: Tensor | None = None,
    summed: bool = True,
    deterministic: bool = False,
) -> Tensor | PairSum:
    """The weighted sum of the tokens' experts, plus `onto` -> a new tensor [T, H].

    x, onto: [T, H]; weights: [T, k] fp32; experts: [T, k] int32, each below E, those of a token all different.
    owned: the weights are of E experts out of more, and experts are numbers of all: those of others add nothing.
    gate_up: [E, 2 * I, H], the rows of gate before those of up; down: [E, H, I]; last dimensions contiguous. act: one
    of ACTS. gate_up_bias: [E, 2 * I], down_bias: [E, H], each for an expert's own output.
    clamp: (alpha, limit) of gpt-oss's activation in place of act, (up + 1) * gate * sigmoid(alpha * gate), where gate
    is at most limit and up from -limit to limit.
    summed: False if it need not be added up yet, in which case it may be a `PairSum`.
    deterministic: each row depends on its row of x, on its experts and on the weights alone, to the bit; on the CPU,
    rows are computed one by one.
    """
    _check(x, weights, experts, gate_up, down, act)
    check_owned(owned, gate_up.shape[0])
    check_biases(x, gate_up_bias, down_bias, (gate_up.shape[:2], down.shape[:2]))
    check_onto(onto, x)
    projections = Projections(gate_up, down, gate_up_bias, down_bias, act, clamp)
    if on_triton(x):
        y = _kernel.experts(x, weights, experts, projections, owned, onto, deterministic=deterministic)
    elif deterministic and x.shape[0]:
        pieces = zip(x.split(1), experts.split(1), strict=True)
        outputs = torch.cat([_experts(row.clone(), own, projections, owned) for row, own in pieces])
        y = PairSum(outputs, weights, onto)
    else:
        y = PairSum(_experts(x, experts, projections, owned), weights, onto)
    return y.total() if summed and isinstance(y, PairSum) else y


def _experts(x: Tensor, experts: Tensor, projections: Projections, owned: ExpertRange | None) -> Tensor:
    """The outputs of all pairs, expert by expert, each with all of its tokens; zeros of others' experts."""
    gate_up, down, gate_up_bias, down_bias, act, clamp = projections
    chosen, pair_expert = experts.shape[1], experts.flatten()
    out = x.new_empty(pair_expert.shape[0], down.shape[1])
    if owned is not None:
        pair_expert = pair_expert - owned.first
        out.zero_()
    for expert in pair_expert.unique().tolist():
        if not 0 <= expert < down.shape[0]:
            continue
        pairs = (pair_expert == expert).nonzero().squeeze(1)
        own = None if gate_up_bias is None else gate_up_bias[expert]
        gate, up = F.linear(x[pairs // chosen], gate_up[expert], own).chunk(2, dim=-1)
        combine = ACTS[act]
        inner = combine(gate, up) if clamp is None else clamped(gate, up, *clamp)
        out[pairs] = F.linear(inner, down[expert], None if down_bias is None else down_bias[expert])
    return out


def _check(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, act: str) -> None:
    if act not in ACTS:
        fail("act", f"must be one of {', '.join(ACTS)}", act)
    if x.dim() != 2:
        fail("x", "must be [T, H]", x.shape)
    check_float(x, "x")
    if gate_up.dim() != 3 or gate_up.shape[1] % 2 or gate_up.shape[2] != x.shape[1]:
        fail("gate_up", f"must be [E, 2 * I, {x.shape[1]}]", gate_up.shape)
    if down.shape != (gate_up.shape[0], x.shape[1], gate_up.shape[1] // 2):
        fail("down", f"must be {(gate_up.shape[0], x.shape[1], gate_up.shape[1] // 2)}", down.shape)
    for argument, tensor in (("gate_up", gate_up), ("down", down)):
        check_like(tensor, argument, x, "x")
    for argument, tensor in (("x", x), ("gate_up", gate_up), ("down", down)):
        check_last_dim(tensor, argument)
    check_pairs(x, weights, experts)


def check_pairs(x: Tensor, weights: Tensor, experts: Tensor) -> None:
    """What the router has said of x's tokens."""
    for argument, tensor, dtype in (("weights", weights, torch.float32), ("experts", experts, torch.int32)):
        if tensor.dim() != 2 or tensor.shape[0] != x.shape[0] or tensor.dtype != dtype or tensor.device != x.device:
            fail(argument, f"must be [{x.shape[0]}, k] {dtype} on {x.device}", (tensor.dtype, *tensor.shape))
        if not tensor.is_contiguous():
            fail(argument, "must be contiguous", tensor.stride())
    if weights.shape != experts.shape:
        fail("weights", f"must have the shape of experts, {tuple(experts.shape)}", weights.shape)


def check_owned(owned: ExpertRange | None, count: int) -> None:
    """count: experts that there are weights of."""
    if owned is not None and not 0 <= owned.first <= owned.total - count:
        fail("owned", f"must have room for the {count} experts of gate_up", owned)


def check_biases(x: Tensor, gate_up: Tensor | None, down: Tensor | None, shapes: tuple[torch.Size, torch.Size]) -> None:
    for argument, bias, shape in (("gate_up_bias", gate_up, shapes[0]), ("down_bias", down, shapes[1])):
        if bias is not None:
            if bias.shape != shape or not bias.is_contiguous():
                fail(argument, f"must be contiguous and {tuple(shape)}", bias.shape)
            check_like(bias, argument, x, "x")


def check_onto(onto: Tensor | None, x: Tensor) -> None:
    if onto is not None:
        if onto.shape != x.shape:
            fail("onto", f"must have the shape of x, {tuple(x.shape)}", onto.shape)
        check_like(onto, "onto", x, "x")
        check_last_dim(onto, "onto")
