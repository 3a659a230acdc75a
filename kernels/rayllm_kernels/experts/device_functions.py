"""Triton device functions of all grouped products: what a program's tile is, and what goes into the last product.

FORM is the compile-time argument of a kernel, with the fields `tiles`, `act`, `alpha`, `limit`, `top_k` and `grouped`
of `products_kernel.Form`.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from ..activation import activate


@triton.jit
def activate_gated(gate, up, FORM: tl.constexpr):
    """act(gate) * up, or gpt-oss's activation."""
    ACT: tl.constexpr = FORM.act
    if ACT == "clamped":
        gate = tl.minimum(gate, FORM.limit)
        up = tl.minimum(tl.maximum(up, -FORM.limit), FORM.limit)
        return (up + 1.0) * (gate / (1.0 + tl.exp(-gate * FORM.alpha)))
    else:
        return activate(gate, ACT) * up


@triton.jit
def is_owned(expert, owned):
    """owned: (the first expert whose weights are here, how many are)."""
    return (expert >= owned[0]) & (expert < owned[0] + owned[1])


@triton.jit
def find_tile(groups, experts_ptr, owned, tile, most, FORM: tl.constexpr):
    """(expert, first place, end of the expert's places) of a tile; nothing but places past the end if there is none.

    The expert counts from the first whose weights are here. groups: of `Groups`, None if each pair is a tile. owned: as
    for `is_owned`, None if all are here. most: tiles that there is room for.
    """
    if FORM.grouped:
        # All at once, since a program begins with waiting for them; what is past the last tile is not used.
        _, tiles_ptr, count_ptr, _ = groups
        expert = tl.load(tiles_ptr + tile)
        first = tl.load(tiles_ptr + most + tile)
        end = tl.load(tiles_ptr + 2 * most + tile)
        end = tl.where(tile < tl.load(count_ptr), end, first)
    else:
        expert, first, end = tl.load(experts_ptr + tile), tile, tile + 1
        if owned is not None:
            end = tl.where(is_owned(expert, owned), end, first)
            expert -= owned[0]
    return expert, first, end


@triton.jit
def find_rows(groups, first, end, FORM: tl.constexpr):
    """(which rows of a tile there are, the rows of x that they are of, the rows of y that they go to)."""
    TILES: tl.constexpr = FORM.tiles
    place = first + tl.arange(0, TILES.tokens)
    real = place < end
    pair = place
    if FORM.grouped:
        pair = tl.load(groups[0] + place, mask=real, other=0)
    if FORM.act is not None:
        source, target = pair // FORM.top_k, place
    else:
        source, target = place, pair
    return real, source, target


@triton.jit
def add_pairs(pairs, token, columns, column, TOP_K: tl.constexpr):
    """fp32: what is to be added up of a token, in these columns, up to `columns`. pairs: of `pair_sum.of_kernels`."""
    outputs_ptr, weights_ptr, experts_ptr, owned, onto_ptr, stride_onto = pairs
    mask = column < columns
    total = tl.zeros(column.shape, tl.float32)
    if onto_ptr is not None:
        total += tl.load(onto_ptr + token * stride_onto + column, mask=mask, other=0.0).to(tl.float32)
    for i in tl.static_range(TOP_K):
        pair = token * TOP_K + i
        if owned is not None:
            if is_owned(tl.load(experts_ptr + pair), owned):
                total += _weighted(outputs_ptr, weights_ptr, pair, columns, column, mask)
        else:
            total += _weighted(outputs_ptr, weights_ptr, pair, columns, column, mask)
    return total


@triton.jit
def _weighted(outputs_ptr, weights_ptr, pair, columns, column, mask):
    outputs = tl.load(outputs_ptr + pair * columns + column, mask=mask, other=0.0).to(tl.float32)
    return tl.load(weights_ptr + pair) * outputs


@triton.jit
def store_at_places(values, y_ptr, routed, token, columns, column, TOP_K: tl.constexpr):
    """Store a token's values at the places of its pairs, rows of `columns`; those of others' experts have none.

    routed: (places, experts, owned as for `is_owned`).
    """
    places_ptr, experts_ptr, owned = routed
    mask = column < columns
    for i in range(TOP_K):
        pair = token * TOP_K + i
        here = pair >= 0
        if owned is not None:
            here = is_owned(tl.load(experts_ptr + pair), owned)
        if here:
            place = tl.load(places_ptr + pair).to(tl.int64)
            tl.store(y_ptr + place * columns + column, values, mask=mask)
