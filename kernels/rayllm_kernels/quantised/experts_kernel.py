"""The Triton kernel of `experts_quantised`: the two grouped products of `experts/products_kernel.py`, whose tiles, list
of pairs and sum over a token's experts these are, with weights that become floats as they are multiplied.

    h[p] = act(G_e x[t], U_e x[t]),   z[q] = round(D_e h[p])

A byte of 4-bit weights has two numbers, of inputs in the two halves of a row, so a tile of bytes is two products.

A tile's depth is a group of inputs that share a scale, or a part of one: its sum is scaled and added in fp32, in
ascending order of K. Where scales are `Form.joined`, weights are multiplied with them instead, before tensor cores add
up all of K: of MXFP4 this is exact in bf16, whose exponents are those of fp32. Scales are asked for a step before they
are used, since no asynchronous copy takes so few bytes.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..compile_ahead import launch
from ..dependent_launch import wait_for_predecessor
from ..device import Hardware, hardware
from ..e2m1 import decode_e2m1, decode_exponents
from ..e4m3 import decode_e4m3
from ..experts.device_functions import activate_gated, find_rows, find_tile
from ..experts.experts import ExpertRange
from ..experts.group_kernel import Groups, arrange, most_tiles
from ..experts.pair_sum import PairSum
from ..experts.pairs_kernel import PairWeight, sum_pairs
from ..experts.products_kernel import activation_of, first_and_number
from ..linear.device_functions import add_products, no_sums, sums
from ..linear.plans import Tiles
from . import plans
from .dequantised_experts import multiply_dequantised
from .experts import ExpertWeight, QuantisedProjections
from .int4 import MIDDLE
from .int4_product_kernel import decode_int4

SYMMETRIC_ZERO = tl.constexpr(MIDDLE)

# Four bytes -> weights of their lower numbers, two in each of two registers, and of their upper ones, times the scales
# of all of these. Each byte is spread to both bytes of 16 bits, so that shifts move its bits to their places, which are
# those of a bf16 number that is 2^126 times too small.
DECODE_E2M1 = tl.constexpr(
    """{
.reg .b32 a, b, c, none;
mov.b32 none, 0x80008000;
"""
    + "".join(
        f"""prmt.b32 a, $4, 0, {spread};
shl.b32 b, a, 4;
shl.b32 c, a, 6;
and.b32 c, c, 0x01c001c0;
lop3.b32 b, b, 0x80008000, c, 0xea;
fma.rn.bf16x2 ${i}, b, ${5 + i}, none;
shl.b32 c, a, 2;
and.b32 c, c, 0x01c001c0;
lop3.b32 b, a, 0x80008000, c, 0xea;
fma.rn.bf16x2 ${2 + i}, b, ${7 + i}, none;
"""
        for i, spread in enumerate(("0x1100", "0x3322"))
    )
    + "}"
)

E2M1_OPERANDS = tl.constexpr("=r,=r,=r,=r,r,r,r,r,r")
# Joined weights are 2^32 times too small, so that 2^126 less of that times a scale is a bf16: of scales up to 2^33, as
# which larger ones are taken. BIAS: of exponents with this.
MORE, BIAS = tl.constexpr(2.0**32), tl.constexpr(126 - 32)


class Form(NamedTuple):
    """The compile-time argument of the kernel. The fields up to `grouped` are as in `experts/products_kernel.py`."""

    tiles: Tiles
    act: str | None
    alpha: float
    limit: float
    top_k: int
    grouped: bool
    kind: str  # of the weights
    group: int  # inputs that share a scale; 0 for all
    rows: int  # outputs that do
    joined: bool  # weights, of MXFP4, are multiplied with their scales; the depth is whole groups
    overlap: bool  # launches overlap (`dependent_launch.py`)


@triton.jit
def _add_tile(acc, numbers, x, scales_ptr, zeros_ptr, start, inputs, FORM: tl.constexpr):
    """acc plus the scaled products of a tile that begins at input `start`. The pointers are of rows."""
    TILES: tl.constexpr = FORM.tiles
    group = 0
    if FORM.group > 0:
        group = tl.minimum(start, inputs - 1) // FORM.group
    scales = tl.load(scales_ptr + group)
    if FORM.kind == "fp8":
        weights = decode_e4m3(numbers, x.dtype)
    elif FORM.kind == "mxfp4":
        weights = decode_e2m1(numbers, x.dtype)
        scales = decode_exponents(scales)
    elif zeros_ptr is not None:
        weights = decode_int4(numbers, tl.load(zeros_ptr + group).to(tl.int32)[:, None], x.dtype)
    else:
        weights = decode_int4(numbers, tl.full([1, 1], SYMMETRIC_ZERO, tl.int32), x.dtype)
    products = add_products(no_sums(TILES), weights, x, TILES)
    if TILES.weights_first:
        return acc + products * scales[:, None]
    else:
        return acc + products * scales[None, :]


@triton.jit
def _add_bytes(acc, codes_ptr, row_pointers, x, second, start, inputs, half, depth, FORM: tl.constexpr):
    """acc plus what the bytes at `start` of rows give: one tile, or two, of which `second` are the other tokens."""
    scales_ptr, zeros_ptr = row_pointers
    codes = tl.load(codes_ptr + start + depth, mask=start + depth < half, other=0).to(tl.int32)
    if FORM.kind == "fp8":
        return _add_tile(acc, codes, x, scales_ptr, zeros_ptr, start, inputs, FORM)
    else:
        acc = _add_tile(acc, codes & 15, x, scales_ptr, zeros_ptr, start, inputs, FORM)
        return _add_tile(acc, codes >> 4, second, scales_ptr, zeros_ptr, half + start, inputs, FORM)


@triton.jit
def _load_scales(scales_ptr, start, half, num_groups, FORM: tl.constexpr):
    """(scales of the inputs of the first half at bytes from `start` on, of the second), both [outputs, groups of a
    tile]; past the end of K, where inputs are zero, those of the last group.
    """
    TILES: tl.constexpr = FORM.tiles
    place = tl.arange(0, TILES.depth // FORM.group)
    low = tl.minimum(start // FORM.group + place, num_groups - 1)[None, :]
    high = tl.minimum((half + start) // FORM.group + place, num_groups - 1)[None, :]
    return tl.load(scales_ptr[:, None] + low), tl.load(scales_ptr[:, None] + high)


@triton.jit
def _factors(scales, FORM: tl.constexpr):
    """What the number of each input is multiplied by, [outputs, depth]."""
    TILES: tl.constexpr = FORM.tiles
    GROUPS: tl.constexpr = TILES.depth // FORM.group
    exponents = tl.minimum(scales.to(tl.int32) + BIAS, 254)
    factors = (exponents << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
    factors = tl.broadcast_to(factors[:, :, None], [TILES.outputs, GROUPS, FORM.group])
    return tl.reshape(factors, [TILES.outputs, TILES.depth])


@triton.jit
def _add_joined(acc, codes_ptr, scales, x, second, start, half, depth, FORM: tl.constexpr):
    """acc plus what the bytes at `start` of rows give: two tiles, of which `second` are the other tokens."""
    TILES: tl.constexpr = FORM.tiles
    codes = tl.load(codes_ptr + start + depth, mask=start + depth < half, other=0)
    operands = codes, _factors(scales[0], FORM), _factors(scales[1], FORM)
    weights, others = tl.inline_asm_elementwise(
        DECODE_E2M1, E2M1_OPERANDS, operands, dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
    )
    acc = add_products(acc, weights, x, TILES)
    return add_products(acc, others, second, TILES)


@triton.jit(do_not_specialize=["most"])
def _quantised_experts_kernel(
    x_ptr, weight, bias_ptr, y_ptr, experts_ptr, owned, groups, x_stride, sizes, most, FORM: tl.constexpr
):
    """weight: (codes, scales, zeros or None). owned, groups, most: as for `find_tile`.

    sizes: (K, outputs, bytes of a row, an expert's rows of scales, groups of a row).
    """
    codes_ptr, scales_ptr, zeros_ptr = weight
    inputs, outputs, half, scale_rows, num_groups = sizes
    TILES: tl.constexpr = FORM.tiles
    OUTPUTS: tl.constexpr = TILES.outputs
    wait_for_predecessor(FORM.overlap)
    column_tiles = tl.cdiv(outputs, OUTPUTS)
    tile, column_tile = tl.program_id(0) // column_tiles, tl.program_id(0) % column_tiles
    expert, first, end = find_tile(groups, experts_ptr, owned, tile, most, FORM)
    if first >= end:
        return
    real, source, target = find_rows(groups, first, end, FORM)
    own_rows = outputs
    if FORM.act is not None:
        own_rows = 2 * outputs
    output = column_tile * OUTPUTS + tl.arange(0, OUTPUTS)
    depth = tl.arange(0, TILES.depth)[None, :]
    # Rows past the end repeat the last one and are not stored.
    row = tl.minimum(output, outputs - 1)
    own_codes = codes_ptr + (expert.to(tl.int64) * own_rows + row)[:, None] * half
    up_codes = own_codes + tl.cast(outputs, tl.int64) * half
    scale_row = expert.to(tl.int64) * scale_rows + row // FORM.rows
    up_scale_row = expert.to(tl.int64) * scale_rows + (outputs + row) // FORM.rows
    own_zeros, up_zeros = zeros_ptr, zeros_ptr
    if zeros_ptr is not None:
        own_zeros, up_zeros = zeros_ptr + scale_row * num_groups, zeros_ptr + up_scale_row * num_groups
    own_pointers = scales_ptr + scale_row * num_groups, own_zeros
    up_pointers = scales_ptr + up_scale_row * num_groups, up_zeros
    inputs_ptr = x_ptr + source.to(tl.int64)[:, None] * x_stride
    acc = no_sums(TILES)
    up_acc = acc
    if FORM.joined:
        scales = _load_scales(own_pointers[0], 0, half, num_groups, FORM)
        up_scales = scales
        if FORM.act is not None:
            up_scales = _load_scales(up_pointers[0], 0, half, num_groups, FORM)
    for start in range(0, half, TILES.depth):
        at = start + depth
        x = tl.load(inputs_ptr + at, mask=real[:, None] & (at < half) & (at < inputs), other=0.0)
        second = x
        if FORM.kind != "fp8":
            there = real[:, None] & (at < half) & (half + at < inputs)
            second = tl.load(inputs_ptr + half + at, mask=there, other=0.0)
        if FORM.joined:
            following = start + TILES.depth
            next_scales = _load_scales(own_pointers[0], following, half, num_groups, FORM)
            acc = _add_joined(acc, own_codes, scales, x, second, start, half, depth, FORM)
            scales = next_scales
            if FORM.act is not None:
                next_scales = _load_scales(up_pointers[0], following, half, num_groups, FORM)
                up_acc = _add_joined(up_acc, up_codes, up_scales, x, second, start, half, depth, FORM)
                up_scales = next_scales
        else:
            acc = _add_bytes(acc, own_codes, own_pointers, x, second, start, inputs, half, depth, FORM)
            if FORM.act is not None:
                up_acc = _add_bytes(up_acc, up_codes, up_pointers, x, second, start, inputs, half, depth, FORM)
    if FORM.joined:
        acc *= MORE
        up_acc *= MORE

    column = output[None, :]
    if bias_ptr is not None:
        bias_ptr += expert.to(tl.int64) * own_rows
    y = sums(acc, bias_ptr, column, outputs, TILES)
    if FORM.act is not None:
        if bias_ptr is not None:
            bias_ptr += outputs
        y = activate_gated(y, sums(up_acc, bias_ptr, column, outputs, TILES), FORM)
    target_ptr = y_ptr + target.to(tl.int64)[:, None] * outputs + column
    tl.store(target_ptr, y.to(y_ptr.dtype.element_ty), mask=real[:, None] & (column < outputs))


def multiply(
    x: Tensor,
    projections: QuantisedProjections,
    experts: Tensor,
    groups: Groups | None,
    tiles: Tiles,
    *,
    gated: bool,
    joined: bool = False,
    owned: ExpertRange | None = None,
) -> Tensor:
    """h of x [T, H] if `gated`, z of h [P, I] otherwise; experts [T, k] and their groups, if any.

    tiles: its tokens are the rows of a tile of the groups. joined: as of `Form`.
    """
    weight, bias = (projections[0], projections[2]) if gated else (projections[1], projections[3])
    count, rows, num_bytes = weight.codes.shape
    outputs = rows // 2 if gated else rows
    y = torch.empty((experts.numel(), outputs), dtype=x.dtype, device=x.device)
    most = experts.numel() if groups is None else most_tiles(experts.numel(), count, tiles.tokens)
    gpu = hardware(x.device)
    form = Form(
        tiles,
        *activation_of(projections.act, projections.clamp, gated=gated),
        experts.shape[1],
        groups is not None,
        weight.kind,
        weight.group or 0,
        weight.rows,
        joined,
        gpu.can_overlap,
    )
    of_x = tiles.tokens * x.element_size() * (1 if weight.kind == "fp8" else 2)
    stages = gpu.stages(tiles.num_stages, (of_x + (2 if gated else 1) * tiles.outputs) * tiles.depth)
    options = {"num_warps": tiles.num_warps, "num_stages": stages, "launch_pdl": gpu.can_overlap}
    sizes = (x.shape[1], outputs, num_bytes, *weight.scales.shape[1:])
    launch(_quantised_experts_kernel, (most * triton.cdiv(outputs, tiles.outputs),))(
        x,
        (weight.codes, weight.scales, weight.zeros),
        bias,
        y,
        experts,
        first_and_number(owned, count),
        groups,
        x.stride(0),
        sizes,
        most,
        FORM=form,
        **options,
    )
    return y


def pair_weight(weight: ExpertWeight, gpu: Hardware) -> PairWeight:
    """For vector products of pairs; GPUs that do not convert e4m3 decode its bytes."""
    if weight.kind == "fp8":
        codes = weight.codes.view(torch.float8_e4m3fn) if gpu.has_e4m3 else weight.codes
        return PairWeight(codes, weight.scales, weight.group, weight.rows)
    codes = weight.codes.view(torch.int32)
    return PairWeight(codes, weight.scales, weight.group, 1, weight.kind, weight.zeros, weight.inputs)


def sum_few(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    projections: QuantisedProjections,
    owned: tuple[int, int] | None,
    onto: Tensor | None,
) -> Tensor:
    """y of few pairs of a token and an expert, each a vector product. owned: of `first_and_number`."""
    gpu, activation = hardware(x.device), activation_of(projections.act, projections.clamp, gated=True)
    operands = pair_weight(projections.gate_up, gpu), pair_weight(projections.down, gpu)
    biases = projections.gate_up_bias, projections.down_bias
    return sum_pairs(x, weights, experts, operands, biases, activation, owned=owned, onto=onto)


def experts(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    projections: QuantisedProjections,
    owned: ExpertRange | None,
    onto: Tensor | None,
    *,
    deterministic: bool,
) -> Tensor | PairSum:
    """y of checked arguments."""
    if not x.numel():
        return torch.empty_like(x)
    num_here = projections.down.codes.shape[0]
    gpu, here = hardware(x.device), first_and_number(owned, num_here)
    mean_pairs = experts.numel() / (num_here if owned is None else owned.total)
    if not deterministic and all(
        plans.dequantised_experts_take(each.kind, each.inputs, mean_pairs, x.dtype, gpu) for each in projections[:2]
    ):
        return PairSum(multiply_dequantised(x, experts, projections, owned), weights, onto, experts, here)
    rows, groups = arrange(experts, num_here, owned, x.dtype)
    few = groups is None and not deterministic
    if few and all(plans.pairs_take(each.kind, each.codes.shape[2]) for each in projections[:2]):
        return sum_few(x, weights, experts, projections, here, onto)
    y = x
    for weight, gated in ((projections.gate_up, True), (projections.down, False)):
        joined = plans.joins_scales(weight.kind, x.dtype, gpu)
        tiles = plans.choose_expert_tiles(
            rows, weight.kind, weight.group, x.dtype, gpu, gated=gated, joined=joined, deterministic=deterministic
        )
        y = multiply(y, projections, experts, groups, tiles, gated=gated, joined=joined, owned=owned)
    return PairSum(y, weights, onto, experts, here)
