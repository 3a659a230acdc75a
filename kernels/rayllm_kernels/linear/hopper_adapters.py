"""Low-rank adapters inside `hopper_kernel`: the device functions that are theirs alone.

    y_t = W x_t + B_s A_s x_t,   s = slots[t]

as in `lora/lora.py`, without a launch of its own. The first programs, the shrinkers, begin with u = A_s x: they stream
rows of A as all stream W, each a part of K, and leave sums that are not rounded. An `AdapterTile` says how many they
are. All programs add B_s u to a tile of W x a few stages before the tile is done, while the last ones are on their way:
they wait until the shrinkers are done, add the parts up in their order, and round.

A [S, P, R, in] is a matrix of S * P * R rows. Blocks of 16 of its rows, of those slots that tokens have, fill the
tiles that W's rows fill otherwise: the blocks of the first such slot, then those of the next one. u is fp32
[parts, T, P, R], of each token's own slot alone, and zero beyond its rank.

Two counters: of consumers that have left their part of u, and of tiles that have seen all of them. The last one sets
both back.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from ..compat import copy_async
from .plans import ADAPTER_ROWS, MAX_HOPPER_TOKENS

ROWS = gl.constexpr(ADAPTER_ROWS)  # of a block of A, and the depth of one product with B
MAX_TOKENS = gl.constexpr(MAX_HOPPER_TOKENS)


@gluon.jit
def _either(a, b):
    return a | b


@gluon.jit
def present_slots(slots_ptr, tokens):
    """The slots that tokens have, a bit each."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([MAX_TOKENS // 32], [32], [gl.num_warps()], [0])
    token = gl.arange(0, MAX_TOKENS, layout=LAYOUT)
    slot = gl.load(slots_ptr + token, mask=token < tokens, other=-1)
    return gl.reduce(gl.where(slot >= 0, 1 << gl.maximum(slot, 0), 0), 0, _either)


@gluon.jit
def count_blocks(present, ADAPTERS: gl.constexpr):
    """Blocks of the slots in `present`."""
    SLOTS: gl.constexpr = ADAPTERS.slots
    count = present * 0
    for slot in gl.static_range(SLOTS):
        count += (present >> slot) & 1
    return count * ADAPTERS.slot_blocks


@gluon.jit
def _slot_of(number, present, ADAPTERS: gl.constexpr):
    """Slot `number` of those that are present, -1 if there are not so many."""
    SLOTS: gl.constexpr = ADAPTERS.slots
    slot, seen = number * 0 - 1, number * 0
    for candidate in gl.static_range(SLOTS):
        bit = (present >> candidate) & 1
        slot = gl.where((bit != 0) & (seen == number), candidate, slot)
        seen += bit
    return slot


@gluon.jit
def copy_blocks(a_desc, first, count, present, column, full, smem, at, ADAPTERS: gl.constexpr, BLOCKS: gl.constexpr):
    """Start copies of blocks first ... of `count` in all, at most BLOCKS, to the blocks of `smem` from `at` on."""
    for i in gl.static_range(BLOCKS):
        if first + i < count:
            block = first + i
            slot = _slot_of(block // ADAPTERS.slot_blocks, present, ADAPTERS)
            inner = block % ADAPTERS.slot_blocks
            row = (slot * ADAPTERS.projections + inner // ADAPTERS.rank_blocks) * ADAPTERS.rank
            row += inner % ADAPTERS.rank_blocks * ROWS
            copy_async(a_desc, [row, column], full, smem.index(at + i))


@gluon.jit
def store_shrunk(acc, first, first_token, part, present, slots_ptr, tokens, adapters, ADAPTERS: gl.constexpr):
    """Leave sums [rows of blocks first ..., tokens first_token ...] as part number `part` of u."""
    _, ranks_ptr, u_ptr, _ = adapters
    LAYOUT: gl.constexpr = acc.type.layout
    P: gl.constexpr = ADAPTERS.projections
    R: gl.constexpr = ADAPTERS.rank
    row = gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    token = first_token + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    block = first + row // ROWS
    slot = _slot_of(block // ADAPTERS.slot_blocks, present, ADAPTERS)
    inner = block % ADAPTERS.slot_blocks
    projection = inner // ADAPTERS.rank_blocks
    rank = inner % ADAPTERS.rank_blocks * ROWS + row % ROWS
    there = (slot >= 0) & (rank < R)
    num_ranks = gl.load(ranks_ptr + slot * P + projection, mask=there, other=0)
    own = gl.load(slots_ptr + token, mask=token < tokens, other=-1)
    target = u_ptr + ((part * tokens + token) * (P * R))[None, :] + (projection * R + rank)[:, None]
    value = gl.where((rank < num_ranks)[:, None], acc, 0.0)
    gl.store(target, value, mask=there[:, None] & (own[None, :] == slot[:, None]), cache_modifier=".cg")


@gluon.jit
def wait_for_shrunk(counters_ptr, arrivals, tiles):
    """Wait until so many consumers have left their part of u. Called once for each of `tiles`."""
    while gl.atomic_add(counters_ptr, 0, sem="acquire") < arrivals:
        pass
    if gl.atomic_add(counters_ptr + 1, 1, sem="relaxed") == tiles - 1:
        gl.atomic_xchg(counters_ptr, 0, sem="relaxed")
        gl.atomic_xchg(counters_ptr + 1, 0, sem="relaxed")


@gluon.jit
def _sum_parts(u_ptr, own, first_token, projection, rank, tokens, LAYOUT: gl.constexpr, ADAPTERS: gl.constexpr):
    """fp32 [ROWS, tokens of `own`], u from `rank` on, of tokens that have a slot."""
    P: gl.constexpr = ADAPTERS.projections
    R: gl.constexpr = ADAPTERS.rank
    token = first_token + gl.arange(0, own.shape[0], layout=gl.SliceLayout(0, LAYOUT))
    rank += gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    PARTS: gl.constexpr = ADAPTERS.parts
    source = u_ptr + (token * (P * R))[None, :] + (projection * R + rank)[:, None]
    there = (own >= 0)[None, :] & (rank < R)[:, None]
    u = gl.load(source, mask=there, other=0.0, cache_modifier=".cg")
    for _ in gl.static_range(1, PARTS):
        source += tokens * (P * R)
        u += gl.load(source, mask=there, other=0.0, cache_modifier=".cg")
    return u


@gluon.jit
def add_expanded(
    acc, first, first_token, present, slots_ptr, tokens, outputs, adapters, GATED: gl.constexpr, ADAPTERS: gl.constexpr
):
    """acc [outputs first ..., tokens first_token ...] plus B u. GATED: rows of gate and up take turns, 8 by 8."""
    b_ptr, ranks_ptr, u_ptr, ends = adapters
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
    P: gl.constexpr = ADAPTERS.projections
    R: gl.constexpr = ADAPTERS.rank
    SLOTS: gl.constexpr = ADAPTERS.slots
    ASKED: gl.constexpr = min(SLOTS, 8)  # slots whose weights are asked for at a time
    row = gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, LEFT))
    if GATED:
        output = first + row // 16 * 8 + row % 8
        inside = output < outputs
        output += row // 8 % 2 * outputs
        rows = outputs * 2
    else:
        output = first + row
        inside = output < outputs
        rows = outputs
    projection = row * 0
    for i in gl.static_range(P - 1):
        projection += (output >= ends[i]).to(gl.int32)
    own_token = first_token + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, RIGHT))
    own = gl.load(slots_ptr + own_token, mask=own_token < tokens, other=-1)
    column = gl.arange(0, ROWS, layout=gl.SliceLayout(0, LEFT))
    LAYOUT: gl.constexpr = acc.type.layout
    acc = gl.convert_layout(acc, SUMS, assert_trivial=True)
    for rank in gl.static_range(0, R, ROWS):
        for first_slot in gl.static_range(0, SLOTS, ASKED):
            weights = ()
            for slot in gl.static_range(first_slot, min(first_slot + ASKED, SLOTS)):
                here = inside & (((present >> slot) & 1) != 0)
                num_ranks = gl.load(ranks_ptr + slot * P + projection, mask=here, other=0)
                source = b_ptr + (slot * rows + output)[:, None] * R + (rank + column)[None, :]
                b = gl.load(source, mask=here[:, None] & (rank + column < R)[None, :], other=0.0)
                weights = weights + (gl.where((rank + column)[None, :] < num_ranks[:, None], b, 0.0),)
            for i in gl.static_range(P):
                # The tile has rows of this projection: always if gate and up take turns.
                is_met = True
                if not GATED:
                    if i > 0:
                        is_met = first + acc.shape[0] > ends[i - 1]
                    if i < P - 1:
                        is_met = is_met & (first < ends[i])
                if is_met:
                    u = _sum_parts(u_ptr, own, first_token, i, rank, tokens, RIGHT, ADAPTERS).to(b_ptr.dtype.element_ty)
                    for j in gl.static_range(len(weights)):
                        if ((present >> (first_slot + j)) & 1) != 0:
                            b = weights[j]
                            if P > 1:
                                b = gl.where((projection == i)[:, None], b, 0.0)
                            acc = mma_v2(b, gl.where((own == first_slot + j)[None, :], u, 0.0), acc)
    return gl.convert_layout(acc, LAYOUT, assert_trivial=True)
