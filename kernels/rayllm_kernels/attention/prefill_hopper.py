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
padding of captured steps, have no tasks. Programs stay resident and draw tasks from a counter, so long tasks balance
out. The producer draws and announces the next task when it has copied the first keys of this one, and goes on to its
keys; consumers load its queries and start its first product before they write this one's rows.

Each of the two consumers has its own copy of some 1,600 instructions a task, probably more than the caches of
instructions hold: one more copy of a part costs time even where it runs seldom (docs/performance.md).

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
FIELDS = gl.constexpr(6)  # of a task: seq_len, query_len, first_query, first_row, kv_head, sequence
SLOTS = gl.constexpr(2)  # tasks announced ahead
SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
# Two numbers in one register, the first one in the lower half.
PAIR_OF_BF16 = gl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")
PAIR_OF_FP16 = gl.constexpr("cvt.rn.f16x2.f32 $0, $2, $1;")
# In assembly, as compilers would compare ahead of the product and keep what they find as bits in registers.
HIDE = gl.constexpr("{ .reg .pred seen; setp.le.s32 seen, $2, $3; selp.f32 $0, $1, 0fFF800000, seen; }")
# Of 4 x 4 registers, four in each of four threads, the transpose.
TRANSPOSE = gl.constexpr("""{
    .reg .pred odd, high;
    .reg .b32 bit, a, b;
    mov.u32 a, %laneid;
    and.b32 bit, a, 1;
    setp.ne.u32 odd, bit, 0;
    and.b32 bit, a, 2;
    setp.ne.u32 high, bit, 0;
    selp.b32 a, $4, $5, odd;
    selp.b32 b, $6, $7, odd;
    shfl.sync.bfly.b32 a, a, 1, 31, -1;
    shfl.sync.bfly.b32 b, b, 1, 31, -1;
    selp.b32 $0, a, $4, odd;
    selp.b32 $1, $5, a, odd;
    selp.b32 $2, b, $6, odd;
    selp.b32 $3, $7, b, odd;
    selp.b32 a, $0, $2, high;
    selp.b32 b, $1, $3, high;
    shfl.sync.bfly.b32 a, a, 2, 31, -1;
    shfl.sync.bfly.b32 b, b, 2, 31, -1;
    selp.b32 $0, a, $0, high;
    selp.b32 $1, b, $1, high;
    selp.b32 $2, $2, a, high;
    selp.b32 $3, $3, b, high;
}""")


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
def _find_task(index, tiles, contexts, SHAPE: gl.constexpr):
    """The FIELDS of task `index`; first_query < 0 if it is empty. tiles: as `_count_tiles` returns it."""
    _, seq_lens_ptr, starts_ptr = contexts
    sequences, first_tile, count = tiles
    tile = first_tile + index % count
    sequence = index * 0
    end = sequence + sequences
    while end - sequence > 1:
        middle = (sequence + end) // 2
        before = gl.load(starts_ptr + middle) // SHAPE.queries + middle > tile
        sequence = gl.where(before, sequence, middle)
        end = gl.where(before, middle, end)
    first_row = gl.load(starts_ptr + sequence)
    query_len = gl.load(starts_ptr + sequence + 1) - first_row
    seq_len = gl.load(seq_lens_ptr + sequence)
    # The last tile of a chunk has the longest context: it comes first.
    number = tile - first_row // SHAPE.queries - sequence
    first_query = (gl.cdiv(query_len, SHAPE.queries) - 1 - number) * SHAPE.queries
    return seq_len, query_len, first_query, first_row, index // count, sequence


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
def _find_rows(tile, table_ptr, seq_len, head_row, rows_per_block, SHAPE: gl.constexpr):
    """Rows of the pool where the boxes of a key tile begin; of the first tile also if `tile` is before it."""
    rows = ()
    for box in gl.static_range(KEYS // SHAPE.box):
        # Table entries past the end hold no valid block: there, the last one is copied again.
        key = gl.minimum(gl.maximum(tile, 0) * KEYS + box * SHAPE.box, (seq_len - 1) // SHAPE.box * SHAPE.box)
        block = gl.load(table_ptr + key // SHAPE.block_size)
        rows += (block * rows_per_block + head_row + key % SHAPE.block_size,)  # type: ignore[assignment]
    return rows


@gluon.jit
def _announce(index, turn, mailbox, counter_ptr, tiles, contexts, SHAPE: gl.constexpr):
    """Post, as number `turn`, the first task from `index` on that is not empty; after the last one, one of length 0."""
    mail, mail_full, mail_free = mailbox
    slot = turn % SLOTS
    hopper.mbarrier.wait(mail_free.index(slot), (turn // SLOTS + 1) % 2)
    searching = True
    while searching:
        if index < tiles[2] * SHAPE.kv_heads:
            task = _find_task(index, tiles, contexts, SHAPE)
            seq_len, first_query = task[0], task[2]
            if (first_query >= 0) & (seq_len > 0):  # a sequence of length 0 is padding
                for field in gl.static_range(FIELDS):
                    _post(mail, slot, field, task[field])
                searching = False
            else:
                index = gl.atomic_add(counter_ptr, 1, sem="relaxed") + gl.num_programs(0)
        else:
            _post(mail, slot, 0, 0)
            searching = False
    hopper.mbarrier.arrive(mail_full.index(slot))


@gluon.jit
def _read_task(turn, mailbox):
    """Wait for the announcement of task number `turn`: its FIELDS, of which seq_len alone counts if it is 0."""
    mail, mail_full, _ = mailbox
    slot = turn % SLOTS
    hopper.mbarrier.wait(mail_full.index(slot), turn // SLOTS % 2)
    seq_len, query_len, first_query = _read(mail, slot, 0), _read(mail, slot, 1), _read(mail, slot, 2)
    return seq_len, query_len, first_query, _read(mail, slot, 3), _read(mail, slot, 4), _read(mail, slot, 5)


@gluon.jit
def _produce(k_desc, v_desc, ring, mailbox, counter_ptr, contexts, batch, pool, stride_table, SHAPE: gl.constexpr):
    """Announce tasks, and copy the keys and values of each from the last tile to the first."""
    tables_ptr, _, starts_ptr = contexts
    rows_per_block, rows_per_head = pool
    k_smem, v_smem, k_full, k_free, v_full, v_free = ring
    use = gl.program_id(0) * 0
    turn = use
    tiles = _count_tiles(batch, starts_ptr, SHAPE.queries)
    _announce(gl.program_id(0), turn, mailbox, counter_ptr, tiles, contexts, SHAPE)
    seq_len, query_len, first_query, _, kv_head, sequence = _read_task(turn, mailbox)
    while seq_len > 0:
        _, high = _key_tiles(seq_len, query_len, first_query, SHAPE.queries)
        table_ptr = tables_ptr + sequence.to(gl.int64) * stride_table
        head_row = kv_head * rows_per_head
        rows = _find_rows(high - 1, table_ptr, seq_len, head_row, rows_per_block, SHAPE)
        for i in range(high):
            stage, parity = use % STAGES, (use // STAGES + 1) % 2
            hopper.mbarrier.wait(k_free.index(stage), parity)
            _copy_tile(k_desc, rows, k_smem.index(stage), k_full.index(stage), SHAPE)
            next_rows = _find_rows(high - 2 - i, table_ptr, seq_len, head_row, rows_per_block, SHAPE)
            hopper.mbarrier.wait(v_free.index(stage), parity)
            _copy_tile(v_desc, rows, v_smem.index(stage), v_full.index(stage), SHAPE)
            rows = next_rows
            use += 1
            if i == 0:
                index = gl.atomic_add(counter_ptr, 1, sem="relaxed") + gl.num_programs(0)
                _announce(index, turn + 1, mailbox, counter_ptr, tiles, contexts, SHAPE)
        turn += 1
        seq_len, query_len, first_query, _, kv_head, sequence = _read_task(turn, mailbox)


@gluon.jit
def _weigh(scores, total, peak, unit, q_pos, first_key, MASKED: gl.constexpr):
    """A step of the online softmax: (weights, decay of what came before, total, peak)."""
    if MASKED:
        key = gl.arange(0, KEYS, layout=gl.SliceLayout(0, scores.type.layout))
        inputs = [scores, key[None, :], (q_pos - first_key)[:, None]]
        scores = gl.inline_asm_elementwise(HIDE, "=f,f,r,r", inputs, dtype=gl.float32, is_pure=True, pack=1)
    new_peak = gl.maximum(peak, gl.max(scores, 1) * unit)
    # A row may see nothing yet: subtracting an infinite peak would turn its zeros into NaN.
    shift = gl.where(new_peak == float("-inf"), 0.0, new_peak) if MASKED else new_peak
    weights = gl.exp2(scores * unit - shift[:, None])
    decay = gl.exp2(peak - shift)
    return weights, decay, total * decay + gl.sum(weights, 1), new_peak


@gluon.jit
def _pack(x, DTYPE: gl.constexpr):
    """fp32 [rows, columns] in DTYPE, as pairs of columns: int32 [rows, columns / 2].

    Single numbers of 16 bits that are kept from step to step are taken apart and joined again in each.
    """
    low, high = gl.split(gl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    PAIR: gl.constexpr = PAIR_OF_FP16 if DTYPE.is_fp16() else PAIR_OF_BF16
    return gl.inline_asm_elementwise(PAIR, "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _unpack(pairs, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """What `_pack` returned, in DTYPE and LAYOUT. Not pure, as it must not be moved between two products."""
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs], dtype=(gl.int16, gl.int16), is_pure=False, pack=1
    )
    codes = gl.reshape(gl.join(low, high), [pairs.shape[0], pairs.shape[1] * 2])
    return gl.convert_layout(codes.to(DTYPE, bitcast=True), LAYOUT)


@gluon.jit
def _new_scores():
    """Zeros, for a product that overwrites them: they must be there before any product starts that runs beside it."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    zeros = gl.zeros([ROWS // 2, KEYS], gl.int32, layout=LAYOUT)
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,r", [zeros], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def _start_scores(q_smem, k_tile, scores):
    return hopper.warpgroup_mma(q_smem, k_tile.permute((1, 0)), scores, use_acc=False, is_async=True)


@gluon.jit
def _step(use, last, acc, pairs, total, peak, q_smem, ring, unit, q_pos, first_key, MASKED: gl.constexpr):
    """Fold in the values of the tile before ring use `use`, whose keys are there, under the softmax of this one."""
    k_smem, v_smem, k_full, k_free, v_full, v_free = ring
    stage, before = use % STAGES, (use - 1) % STAGES
    weights = _unpack(pairs, q_smem.dtype, gl.DotOperandLayout(0, acc.type.layout, 2))
    scores = _start_scores(q_smem, k_smem.index(stage), _new_scores())
    hopper.mbarrier.wait(v_full.index(before), (use - 1) // STAGES % 2)
    acc = hopper.warpgroup_mma(weights, v_smem.index(before), acc, is_async=True)
    scores = hopper.warpgroup_mma_wait(1, deps=(scores,))
    hopper.mbarrier.arrive(k_free.index(stage))
    next_weights, decay, total, peak = _weigh(scores, total, peak, unit, q_pos, first_key, MASKED)
    next_pairs = _pack(next_weights, q_smem.dtype)
    # This spins, which keeps the assembler from moving the wait for the product above the exponentials.
    hopper.mbarrier.wait(k_full.index((use + 1) % STAGES), (use + 1) // STAGES % 2, pred=use < last)
    acc = hopper.warpgroup_mma_wait(0, deps=(acc,))
    hopper.mbarrier.arrive(v_free.index(before))
    acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, acc.type.layout))[:, None]
    return acc, next_pairs, total, peak


@gluon.jit
def _take_task(turn, mailbox):
    """`_read_task` of a consumer, which then gives its slot free: without the sequence."""
    seq_len, query_len, first_query, first_row, kv_head, _ = _read_task(turn, mailbox)
    hopper.mbarrier.arrive(mailbox[2].index(turn % SLOTS))
    return seq_len, query_len, first_query, first_row, kv_head


@gluon.jit
def _find_queries(task, strides, row, SHAPE: gl.constexpr):
    """(offsets, which there are) of a task's rows in q or out."""
    seq_len, query_len, first_query, first_row, kv_head = task
    stride_t, stride_h, _ = strides
    query = first_query + row // SHAPE.group
    there = (row < SHAPE.queries * SHAPE.group) & (query < query_len) & (seq_len > 0)
    head = kv_head * SHAPE.group + row % SHAPE.group
    return (first_row + query).to(gl.int64) * stride_t + head * stride_h, there


@gluon.jit
def _load_queries(q_ptr, task, strides, first_row, SHAPE: gl.constexpr):
    """Half a task's rows, from `first_row` of it on: [64, head_dim]."""
    HEAD_DIM: gl.constexpr = SHAPE.head_dim
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    row = first_row + gl.arange(0, ROWS // 2, layout=gl.SliceLayout(1, WIDE))
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, WIDE))
    offsets, there = _find_queries(task, strides, row, SHAPE)
    mask = there[:, None] & (dims[None, :] < HEAD_DIM)
    return gl.load(q_ptr + offsets[:, None] + dims[None, :], mask=mask, other=0.0)


@gluon.jit
def _store(out_ptr, acc, task, strides, first_row, SHAPE: gl.constexpr):
    """Write half a task's rows.

    In `acc` a thread has two numbers in each eight of a row. Four threads exchange theirs, so that each has whole
    eights: 16 bytes, which it stores at once. Shared memory has no room left for that.
    """
    PAIRS: gl.constexpr = SHAPE.head_dim // 2
    COLUMNS: gl.constexpr = [[0, 4], [0, 8], [8, 0], [0, 16], [0, 32]]
    OWN: gl.constexpr = gl.DistributedLinearLayout(
        COLUMNS if PAIRS == 64 else COLUMNS[:4],
        [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [ROWS // 2, PAIRS],
    )
    pairs = gl.convert_layout(_pack(acc, out_ptr.dtype.element_ty), OWN)
    pairs = gl.inline_asm_elementwise(
        TRANSPOSE, "=&r,=&r,=&r,=&r,r,r,r,r", [pairs], dtype=gl.int32, is_pure=True, pack=4
    )
    # Now a register's number says which pair of four it is, and the thread's number which four.
    fours = gl.permute(gl.reshape(pairs, [ROWS // 2, PAIRS // 16, 4, 4]), (0, 1, 3, 2))
    pairs = gl.reshape(fours, [ROWS // 2, PAIRS])
    LAYOUT: gl.constexpr = pairs.type.layout
    row = first_row + gl.arange(0, ROWS // 2, layout=gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, PAIRS, layout=gl.SliceLayout(0, LAYOUT))
    offsets, there = _find_queries(task, strides, row, SHAPE)
    target = out_ptr.to(gl.pointer_type(gl.int32)) + (offsets // 2)[:, None] + column[None, :]
    gl.store(target, pairs, mask=there[:, None] & (column[None, :] < PAIRS))


@gluon.jit
def _consume(
    q_ptr, out_ptr, q_smem, ring, mailbox, unit, q_strides, out_strides, CONSUMER: gl.constexpr, SHAPE: gl.constexpr
):
    HEAD_DIM: gl.constexpr = SHAPE.head_dim
    FIRST_ROW: gl.constexpr = CONSUMER * (ROWS // 2)
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    k_smem, v_smem, k_full, k_free, v_full, v_free = ring
    row = FIRST_ROW + gl.arange(0, ROWS // 2, layout=gl.SliceLayout(1, SCORES))
    base = gl.program_id(0) * 0  # the ring's use by the first tile of a task
    turn = base
    seq_len, query_len, first_query, first_row, kv_head = _take_task(turn, mailbox)
    task = (seq_len, query_len, first_query, first_row, kv_head)
    q_smem.store(_load_queries(q_ptr, task, q_strides, FIRST_ROW, SHAPE))
    hopper.fence_async_shared()
    hopper.mbarrier.wait(k_full.index(0), 0, pred=seq_len > 0)
    scores = hopper.warpgroup_mma_wait(0, deps=(_start_scores(q_smem, k_smem.index(0), _new_scores()),))
    while seq_len > 0:
        task = (seq_len, query_len, first_query, first_row, kv_head)
        whole, high = _key_tiles(seq_len, query_len, first_query, SHAPE.queries)
        q_pos = seq_len - query_len + first_query + row // SHAPE.group
        stage, last = base % STAGES, base + high - 1
        hopper.mbarrier.arrive(k_free.index(stage))
        total = gl.zeros_like(q_pos).to(gl.float32)
        peak = total + float("-inf")
        weights, _, total, peak = _weigh(scores, total, peak, unit, q_pos, (high - 1) * KEYS, True)
        pairs = _pack(weights, q_smem.dtype)
        if high * KEYS > seq_len:
            # Unwritten slots can hold NaN, which a weight of zero does not hide. Both consumers write the same zeros.
            hopper.mbarrier.wait(v_full.index(stage), base // STAGES % 2)
            values = v_smem.index(stage).load(WIDE)
            key = (high - 1) * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(1, WIDE))
            v_smem.index(stage).store(gl.where((key < seq_len)[:, None], values, gl.zeros_like(values)))
            hopper.fence_async_shared()
        hopper.mbarrier.wait(k_full.index((base + 1) % STAGES), (base + 1) // STAGES % 2, pred=high > 1)

        acc = gl.zeros([ROWS // 2, HEAD_DIM], gl.float32, layout=ACC)
        first_whole = gl.maximum(high - whole, 1)
        for i in range(1, first_whole):
            acc, pairs, total, peak = _step(
                base + i, last, acc, pairs, total, peak, q_smem, ring, unit, q_pos, (high - 1 - i) * KEYS, True
            )
        for i in range(first_whole, high):
            acc, pairs, total, peak = _step(
                base + i, last, acc, pairs, total, peak, q_smem, ring, unit, q_pos, 0, False
            )

        # The last values of this task, and under them the first scores of the next one.
        turn += 1
        seq_len, query_len, first_query, first_row, kv_head = _take_task(turn, mailbox)
        next_task = (seq_len, query_len, first_query, first_row, kv_head)
        queries = _load_queries(q_ptr, next_task, q_strides, FIRST_ROW, SHAPE)
        stage = last % STAGES
        hopper.mbarrier.wait(v_full.index(stage), last // STAGES % 2)
        weights = _unpack(pairs, q_smem.dtype, gl.DotOperandLayout(0, ACC, 2))
        scores = _new_scores()
        acc = hopper.warpgroup_mma(weights, v_smem.index(stage), acc, is_async=True)
        q_smem.store(queries)
        hopper.fence_async_shared()
        base = last + 1
        hopper.mbarrier.wait(k_full.index(base % STAGES), base // STAGES % 2, pred=seq_len > 0)
        scores = _start_scores(q_smem, k_smem.index(base % STAGES), scores)
        acc = hopper.warpgroup_mma_wait(1, deps=(acc,))
        hopper.mbarrier.arrive(v_free.index(stage))
        # Rows of padding have a total too: they see the keys that the last query sees.
        share = 1.0 / gl.convert_layout(total, gl.SliceLayout(1, ACC))
        _store(out_ptr, acc * share[:, None], task, out_strides, FIRST_ROW, SHAPE)
        scores = hopper.warpgroup_mma_wait(0, deps=(scores,))


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
