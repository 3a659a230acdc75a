"""Prefill attention for Hopper GPUs: the function of `prefill_kernel.py` on tensor copies and warp groups.

    s_ij = scale * <q_i, k_j>;  out_i = sum_j softmax(s_i)_j v_j,  j <= p_i = seq_len - query_len + i

q [T, Hq, D] of any row and head stride; cache.k, cache.v [num_blocks, Hkv, block_size, D]; contexts.block_tables
[B, max_blocks] int32 and contexts.seq_lens [B] int32; query_start_loc [B + 1] int32 -> out [T, Hq, D].

Algorithm: FlashAttention-3 (Shah, Bikshandi, Zhang, Thakkar, Ramani, Dao, 2024). A program has three roles that run
side by side. One warp, the producer, copies tiles of keys and values from the pool into a ring in shared memory, one
tensor copy per block and half head, so that no other warp spends an instruction on addresses. Two warp groups, the
consumers, each keep 64 rows of queries; while one waits for its products the other exponentiates, and within a warp
group the product weights x values of one tile runs under the softmax of the next.

A task is 128 rows, queries x the query heads of one KV head, against all keys they see, from the diagonal down to the
first key. Tasks are numbered so that a ragged batch leaves at most one empty task per sequence and KV head: those of
sequence s begin at query_start_loc[s] // queries + s. Rows before the first chunk and sequences after the last one, the
padding of captured steps, have no tasks. Programs stay resident and draw tasks from a counter: the producer fetches the
next task's keys while the consumers finish the last one, and long tasks balance out.

Barriers come in pairs: `full` says that a stage holds data, `free` that both consumers are done with it. The n-th use
of a stage completes phase n, and a wait names the parity of the phase.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..cache.kv_cache import KVCache
from ..compat import copy_async
from ..compile_ahead import launch
from ..device import hardware
from ..hopper import barriers
from .context import Contexts

LOG2E = 1.4426950408889634
ROWS = gl.constexpr(128)
KEYS = gl.constexpr(128)
STAGES = gl.constexpr(3)
HALF = gl.constexpr(64)  # columns that a tensor copy takes: 128 bytes, the widest swizzle
FIELDS = gl.constexpr(5)  # of a task: seq_len, query_len, first_query, first_row, kv_head
SLOTS = gl.constexpr(2)  # tasks announced ahead
SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))


class Shape(NamedTuple):
    """A compile-time argument of the kernel."""

    kv_heads: int
    group: int  # query heads of a KV head
    queries: int  # of a task
    block_size: int
    box: int  # slots that one tensor copy takes
    head_dim: int


@gluon.jit
def _count_tiles(batch, starts_ptr, QUERIES: gl.constexpr):
    """(sequences, first tile, tiles of one KV head) of the rows from the first to the last sequence with queries."""
    tokens = gl.load(starts_ptr + batch)
    low = batch * 0
    high = batch
    while low < high:
        middle = (low + high) // 2
        empty = gl.load(starts_ptr + middle) >= tokens
        high = gl.where(empty, middle, high)
        low = gl.where(empty, low, middle + 1)
    first = gl.load(starts_ptr) // QUERIES
    return low, first, tokens // QUERIES + low - first


@gluon.jit
def _find_task(index, first, tiles, batch, seq_lens_ptr, starts_ptr, QUERIES: gl.constexpr):
    """Task `index` as (sequence, seq_len, query_len, first_query, first_row, kv_head); first_query < 0 if empty."""
    tile = first + index % tiles
    sequence = index * 0
    end = sequence + batch
    while end - sequence > 1:
        middle = (sequence + end) // 2
        before = gl.load(starts_ptr + middle) // QUERIES + middle > tile
        sequence = gl.where(before, sequence, middle)
        end = gl.where(before, middle, end)
    first_row = gl.load(starts_ptr + sequence)
    query_len = gl.load(starts_ptr + sequence + 1) - first_row
    seq_len = gl.load(seq_lens_ptr + sequence)
    # The last tile of a chunk has the longest context: it comes first.
    first_query = (gl.cdiv(query_len, QUERIES) - 1 - (tile - first_row // QUERIES - sequence)) * QUERIES
    return sequence, seq_len, query_len, first_query, first_row, index // tiles


@gluon.jit
def _key_tiles(seq_len, query_len, first_query, QUERIES: gl.constexpr):
    """(whole, high): the task sees key tiles 0..high, and every row sees all of tiles 0..whole."""
    first_pos = seq_len - query_len + first_query
    last_pos = gl.minimum(first_pos + QUERIES, seq_len) - 1
    return (first_pos + 1) // KEYS, gl.cdiv(last_pos + 1, KEYS)


@gluon.jit
def _post(mail, slot, field: gl.constexpr, value):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    mail.index(slot * FIELDS + field).store(gl.full([1], value, gl.int32, layout=LAYOUT))


@gluon.jit
def _read(mail, slot, field: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(mail.index(slot * FIELDS + field).load(LAYOUT), 0)


@gluon.jit
def _copy_tile(desc, rows, tile, full, SHAPE: gl.constexpr):
    """Start to copy KEYS rows into `tile`, a box from each of `rows` on; `full` completes when all are there."""
    hopper.mbarrier.expect(full, KEYS * SHAPE.head_dim * 2)
    for i in gl.static_range(KEYS // SHAPE.box):
        for half in gl.static_range(SHAPE.head_dim // HALF):
            part = tile.slice(i * SHAPE.box, SHAPE.box, dim=0).slice(half * HALF, HALF, dim=1)
            copy_async(desc, [rows[i], half * HALF], full, part)


@gluon.jit
def _copy_keys(base, high, k_desc, v_desc, ring, table_ptr, seq_len, head_row, rows_per_block, SHAPE: gl.constexpr):
    """Key tiles high - 1 down to 0 of one task, into the ring from its use number `base` on."""
    k_smem, v_smem, k_full, k_free, v_full, v_free = ring
    for i in range(high):
        rows = ()
        for box in gl.static_range(KEYS // SHAPE.box):
            # Table entries past the end hold no valid block: there, the last one is copied again.
            key = gl.minimum((high - 1 - i) * KEYS + box * SHAPE.box, (seq_len - 1) // SHAPE.box * SHAPE.box)
            block = gl.load(table_ptr + key // SHAPE.block_size)
            rows += (block * rows_per_block + head_row + key % SHAPE.block_size,)  # type: ignore[assignment]
        stage = (base + i) % STAGES
        parity = ((base + i) // STAGES + 1) % 2
        hopper.mbarrier.wait(k_free.index(stage), parity)
        _copy_tile(k_desc, rows, k_smem.index(stage), k_full.index(stage), SHAPE)
        hopper.mbarrier.wait(v_free.index(stage), parity)
        _copy_tile(v_desc, rows, v_smem.index(stage), v_full.index(stage), SHAPE)


@gluon.jit
def _produce(k_desc, v_desc, ring, mailbox, counter_ptr, contexts, batch, pool, stride_table, SHAPE: gl.constexpr):
    tables_ptr, seq_lens_ptr, starts_ptr = contexts
    rows_per_block, rows_per_head = pool
    QUERIES: gl.constexpr = SHAPE.queries
    mail, mail_full, mail_free = mailbox
    index = gl.program_id(0)
    base = index * 0
    turn = index * 0
    sequences, first_tile, tiles = _count_tiles(batch, starts_ptr, QUERIES)
    while index < tiles * SHAPE.kv_heads:
        sequence, seq_len, query_len, first_query, first_row, kv_head = _find_task(
            index, first_tile, tiles, sequences, seq_lens_ptr, starts_ptr, QUERIES
        )
        if (first_query >= 0) & (seq_len > 0):  # a sequence of length 0 is padding
            slot = turn % SLOTS
            hopper.mbarrier.wait(mail_free.index(slot), (turn // SLOTS + 1) % 2)
            task = (seq_len, query_len, first_query, first_row, kv_head)
            for field in gl.static_range(FIELDS):
                _post(mail, slot, field, task[field])
            hopper.mbarrier.arrive(mail_full.index(slot))
            _, high = _key_tiles(seq_len, query_len, first_query, QUERIES)
            table_ptr = tables_ptr + sequence.to(gl.int64) * stride_table
            head_row = kv_head * rows_per_head
            _copy_keys(base, high, k_desc, v_desc, ring, table_ptr, seq_len, head_row, rows_per_block, SHAPE)
            base += high
            turn += 1
        index = gl.atomic_add(counter_ptr, 1, sem="relaxed") + gl.num_programs(0)
    # A task with an empty context is the end.
    slot = turn % SLOTS
    hopper.mbarrier.wait(mail_free.index(slot), (turn // SLOTS + 1) % 2)
    _post(mail, slot, 0, 0)
    hopper.mbarrier.arrive(mail_full.index(slot))


@gluon.jit
def _weigh(scores, total, peak, unit, q_pos, first_key, MASKED: gl.constexpr):
    """A step of the online softmax: (weights, decay of what came before, total, peak)."""
    if MASKED:
        key = first_key + gl.arange(0, KEYS, layout=gl.SliceLayout(0, scores.type.layout))
        scores = gl.where(key[None, :] <= q_pos[:, None], scores, float("-inf"))
    new_peak = gl.maximum(peak, gl.max(scores, 1) * unit)
    # A row may see nothing yet: subtracting an infinite peak would turn its zeros into NaN.
    shift = gl.where(new_peak == float("-inf"), 0.0, new_peak) if MASKED else new_peak
    weights = gl.exp2(scores * unit - shift[:, None])
    decay = gl.exp2(peak - shift)
    return weights, decay, total * decay + gl.sum(weights, 1), new_peak


@gluon.jit
def _start_scores(q_smem, k_tile):
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    zeros = gl.zeros([ROWS // 2, KEYS], gl.float32, layout=LAYOUT)
    return hopper.warpgroup_mma(q_smem, k_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _step(use, last, acc, weights, total, peak, q_smem, ring, unit, q_pos, first_key, MASKED: gl.constexpr):
    """Fold in the values of the tile before ring use `use`, whose keys are there, under the softmax of this one."""
    k_smem, v_smem, k_full, k_free, v_full, v_free = ring
    stage, before = use % STAGES, (use - 1) % STAGES
    scores = _start_scores(q_smem, k_smem.index(stage))
    hopper.mbarrier.wait(v_full.index(before), (use - 1) // STAGES % 2)
    acc = hopper.warpgroup_mma(weights, v_smem.index(before), acc, is_async=True)
    scores = hopper.warpgroup_mma_wait(1, deps=(scores,))
    hopper.mbarrier.arrive(k_free.index(stage))
    next_weights, decay, total, peak = _weigh(scores, total, peak, unit, q_pos, first_key, MASKED)
    next_weights = gl.convert_layout(next_weights.to(q_smem.dtype), weights.type.layout)
    # This spins, which keeps the assembler from moving the wait for the product above the exponentials.
    hopper.mbarrier.wait(k_full.index((use + 1) % STAGES), (use + 1) // STAGES % 2, pred=use < last)
    acc = hopper.warpgroup_mma_wait(0, deps=(acc,))
    hopper.mbarrier.arrive(v_free.index(before))
    acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, acc.type.layout))[:, None]
    return acc, next_weights, total, peak


@gluon.jit
def _attend(base, q_smem, ring, seq_len, whole, high, unit, q_pos, WIDE: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Attention of the 64 queries in q_smem, at q_pos, over key tiles high - 1 down to 0: fp32 [64, HEAD_DIM]."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    k_smem, v_smem, k_full, k_free, v_full, v_free = ring
    total = gl.zeros_like(q_pos).to(gl.float32)
    peak = total + float("-inf")
    acc = gl.zeros([ROWS // 2, HEAD_DIM], gl.float32, layout=ACC)

    stage, parity = base % STAGES, base // STAGES % 2
    last = base + high - 1
    hopper.mbarrier.wait(k_full.index(stage), parity)
    scores = hopper.warpgroup_mma_wait(0, deps=(_start_scores(q_smem, k_smem.index(stage)),))
    hopper.mbarrier.arrive(k_free.index(stage))
    weights, _, total, peak = _weigh(scores, total, peak, unit, q_pos, (high - 1) * KEYS, True)
    weights = gl.convert_layout(weights.to(q_smem.dtype), gl.DotOperandLayout(0, ACC, 2))
    if high * KEYS > seq_len:
        # Unwritten slots can hold NaN, which a weight of zero does not hide. Both consumers write the same zeros.
        hopper.mbarrier.wait(v_full.index(stage), parity)
        values = v_smem.index(stage).load(WIDE)
        key = (high - 1) * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(1, WIDE))
        v_smem.index(stage).store(gl.where((key < seq_len)[:, None], values, gl.zeros_like(values)))
        hopper.fence_async_shared()
    hopper.mbarrier.wait(k_full.index((base + 1) % STAGES), (base + 1) // STAGES % 2, pred=high > 1)

    first_whole = gl.maximum(high - whole, 1)
    for i in range(1, first_whole):
        acc, weights, total, peak = _step(
            base + i, last, acc, weights, total, peak, q_smem, ring, unit, q_pos, (high - 1 - i) * KEYS, True
        )
    for i in range(first_whole, high):
        acc, weights, total, peak = _step(
            base + i, last, acc, weights, total, peak, q_smem, ring, unit, q_pos, 0, False
        )
    stage = last % STAGES
    hopper.mbarrier.wait(v_full.index(stage), last // STAGES % 2)
    acc = hopper.warpgroup_mma_wait(0, deps=(hopper.warpgroup_mma(weights, v_smem.index(stage), acc, is_async=True),))
    hopper.mbarrier.arrive(v_free.index(stage))
    # Rows of padding have a total too: they see the keys that the last query sees.
    return acc / gl.convert_layout(total, gl.SliceLayout(1, ACC))[:, None]


@gluon.jit
def _consume(
    q_ptr, out_ptr, q_smem, ring, mailbox, unit, q_strides, out_strides, CONSUMER: gl.constexpr, SHAPE: gl.constexpr
):
    stride_qt, stride_qh, _ = q_strides
    stride_ot, stride_oh, _ = out_strides
    GROUP: gl.constexpr = SHAPE.group
    QUERIES: gl.constexpr = SHAPE.queries
    HEAD_DIM: gl.constexpr = SHAPE.head_dim
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    mail, mail_full, mail_free = mailbox
    row = CONSUMER * (ROWS // 2) + gl.arange(0, ROWS // 2, layout=gl.SliceLayout(1, WIDE))
    score_row = CONSUMER * (ROWS // 2) + gl.arange(0, ROWS // 2, layout=gl.SliceLayout(1, SCORES))
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, WIDE))
    base = gl.program_id(0) * 0
    turn = base
    hopper.mbarrier.wait(mail_full.index(0), 0)
    seq_len = _read(mail, 0, 0)
    while seq_len > 0:
        slot = turn % SLOTS
        query_len = _read(mail, slot, 1)
        first_query = _read(mail, slot, 2)
        first_row = _read(mail, slot, 3)
        kv_head = _read(mail, slot, 4)
        hopper.mbarrier.arrive(mail_free.index(slot))

        query = first_query + row // GROUP
        mask = ((row < QUERIES * GROUP) & (query < query_len))[:, None] & (dims[None, :] < HEAD_DIM)
        q_row = (first_row + query).to(gl.int64)
        head = kv_head * GROUP + row % GROUP
        q_ptrs = q_ptr + (q_row * stride_qt + head * stride_qh)[:, None] + dims[None, :]
        q_smem.store(gl.load(q_ptrs, mask=mask, other=0.0))
        hopper.fence_async_shared()
        whole, high = _key_tiles(seq_len, query_len, first_query, QUERIES)
        q_pos = seq_len - query_len + first_query + score_row // GROUP
        acc = _attend(base, q_smem, ring, seq_len, whole, high, unit, q_pos, WIDE, HEAD_DIM)
        # Through shared memory, so that each row is stored in whole cache lines.
        q_smem.store(acc.to(q_smem.dtype))
        out_ptrs = out_ptr + (q_row * stride_ot + head * stride_oh)[:, None] + dims[None, :]
        gl.store(out_ptrs, q_smem.load(WIDE), mask=mask)

        base += high
        turn += 1
        hopper.mbarrier.wait(mail_full.index(turn % SLOTS), turn // SLOTS % 2)
        seq_len = _read(mail, turn % SLOTS, 0)


@gluon.jit(do_not_specialize=[*Contexts._fields, "starts", "batch", "stride_table"])
def _hopper_kernel(
    operands, k_desc, v_desc, block_tables, seq_lens, starts, batch, strides, stride_table, unit, SHAPE: gl.constexpr
):
    """operands: (q, out, counter of tasks). starts: query_start_loc. unit: factor of the products, in units of log2(e).

    strides: (of q, of out, (rows of the pool from block to block, from head to head)).
    """
    q_strides, out_strides, pool = strides
    q_ptr, out_ptr, counter_ptr = operands
    contexts = (block_tables, seq_lens, starts)
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    q_smem = gl.allocate_shared_memory(DTYPE, [2, ROWS // 2, SHAPE.head_dim], SHARED)
    k_smem = gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, SHAPE.head_dim], SHARED)
    v_smem = gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, SHAPE.head_dim], SHARED)
    ring = (k_smem, v_smem, barriers(STAGES, 1), barriers(STAGES, 2), barriers(STAGES, 1), barriers(STAGES, 2))
    mail = gl.allocate_shared_memory(gl.int32, [SLOTS * FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    mailbox = (mail, barriers(SLOTS, 1), barriers(SLOTS, 2))
    hopper.fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (q_ptr, out_ptr, q_smem.index(0), ring, mailbox, unit, q_strides, out_strides, 0, SHAPE)),
            (_consume, (q_ptr, out_ptr, q_smem.index(1), ring, mailbox, unit, q_strides, out_strides, 1, SHAPE)),
            (_produce, (k_desc, v_desc, ring, mailbox, counter_ptr, contexts, batch, pool, stride_table, SHAPE)),
        ],
        [4, 1],
        [240, 24],
    )


def prefill(q: Tensor, cache: KVCache, contexts: Contexts, scale: float, query_start_loc: Tensor, out: Tensor) -> None:
    """Write causal attention to `out`; the arguments are checked, and `hopper_takes` them.

    The pool is viewed as rows of one stride, a slot each.
    """
    num_blocks, kv_heads, block_size, head_dim = cache.k.shape
    stride_block, stride_head, stride_slot, _ = cache.k.stride()
    group = q.shape[1] // kv_heads
    rows_per_block, rows_per_head = stride_block // stride_slot, stride_head // stride_slot
    rows = (num_blocks - 1) * rows_per_block + (kv_heads - 1) * rows_per_head + block_size
    box = min(block_size & -block_size, KEYS.value)  # the largest power of two that divides a block and a key tile
    k_desc, v_desc = (
        TensorDescriptor(part, [rows, head_dim], [stride_slot, 1], [box, HALF.value], SHARED.value)
        for part in (cache.k, cache.v)
    )
    batch, queries = contexts.seq_lens.shape[0], ROWS.value // group
    most = (q.shape[0] // queries + batch) * kv_heads
    counter = torch.zeros(1, dtype=torch.int32, device=q.device)
    strides, stride_table = (q.stride(), out.stride(), (rows_per_block, rows_per_head)), contexts.block_tables.stride(0)
    unit = scale * LOG2E
    options = {"SHAPE": Shape(kv_heads, group, queries, block_size, box, head_dim), "num_warps": 4}
    launch(_hopper_kernel, (min(most, hardware(q.device).multiprocessors),))(
        (q, out, counter), k_desc, v_desc, *contexts, query_start_loc, batch, strides, stride_table, unit, **options
    )
