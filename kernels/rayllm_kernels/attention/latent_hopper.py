"""Decode attention over a cache of latents for Hopper GPUs: the function of `decode_kernel.py` on tensor copies.

    s_j = scale * <q, k_j>;  out = sum_j softmax(s)_j v_j,  v_j the first entries of k_j

q [B, Hq, L + R] of any row and head stride; cache.k [num_blocks, 1, block_size, L + R]; contexts as there -> out
[B, Hq, L], and parts of sequences that borders of ranges cut, for `decode_kernel._merge_kernel`.

All heads of a rank share the keys, but there are few of them: 16 to 32, where a product of a warp group has 64 rows. So
keys and values are the rows here, and heads the columns, as many as there are:

    S^T [keys, heads] = K Q^T,      O^T [L, heads] += V^T P^T

Both products take the tile from where the tensor copies leave it, the second one transposed. One warp, the producer,
keeps a ring of tiles filled; one warp group, the consumer, does all else. A multiprocessor has shared memory for one
program, whose consumer takes about half of the time in which memory brings the next tile.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..cache.kv_cache import KVCache
from ..compat import copy_async
from ..compile_ahead import launch
from ..hopper import barriers
from .context import Contexts
from .prefill_hopper import LOG2E
from .schedule import LATENT_KEYS, RANGE_FIELDS, DecodeSchedule

KEYS = gl.constexpr(LATENT_KEYS)  # of a tile: the rows of the first product
STAGES = gl.constexpr(2)
CHUNK = gl.constexpr(64)  # entries that a tensor copy takes: 128 bytes, the widest swizzle
FIELDS = gl.constexpr(RANGE_FIELDS)
PRODUCER = gl.constexpr(40)  # registers of its threads
REGISTERS = 152  # of all threads on average: the consumer has 255, and small programs of the next kernel fit beside
SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))


class Shape(NamedTuple):
    """A compile-time argument of the kernel."""

    heads: int
    columns: int  # heads of a program, a power of two
    latent: int
    rest: int
    block_size: int
    box: int  # slots that one tensor copy takes


@gluon.jit
def _load_range(schedule):
    """(row of `contexts` in which this program's range begins, its first tile, its end), the sequence there (which, its
    length, its first tile), and whether there are padding rows.
    """
    record = schedule.ranges + gl.program_id(1) * FIELDS
    place = (gl.load(record), gl.load(record + 4), gl.load(record + 5))
    return place, (gl.load(record + 1), gl.load(record + 2), gl.load(record + 3)), gl.load(record + 6)


@gluon.jit
def _load_context(schedule, context, batch):
    """As `decode_kernel._load_context`."""
    pointer = schedule.contexts + context * 2
    return gl.load(pointer, mask=context < batch, other=0), gl.load(pointer + 1, mask=context < batch, other=0)


@gluon.jit
def _produce(k_desc, ring, schedule, block_tables, rows_per_block, stride_table, batch, SHAPE: gl.constexpr):
    latents, rests, full, free = ring
    LATENT: gl.constexpr = SHAPE.latent
    gdc_wait()
    gdc_launch_dependents()
    place, found, _ = _load_range(schedule)
    context, position, end = place
    sequence, seq_len, origin = found
    use = position * 0
    while position < end:
        tiles = gl.cdiv(seq_len, KEYS)
        stop = gl.minimum(end, origin + tiles)
        table = block_tables + sequence.to(gl.int64) * stride_table
        for tile in range(position - origin, stop - origin):
            rows = ()
            for box in gl.static_range(KEYS // SHAPE.box):
                # Table entries past the end hold no valid block: there, the last one is copied again.
                key = gl.minimum(tile * KEYS + box * SHAPE.box, (seq_len - 1) // SHAPE.box * SHAPE.box)
                block = gl.load(table + key // SHAPE.block_size)
                rows += (block * rows_per_block + key % SHAPE.block_size,)  # type: ignore[assignment]
            stage = use % STAGES
            hopper.mbarrier.wait(free.index(stage), (use // STAGES + 1) % 2)
            hopper.mbarrier.expect(full.index(stage), KEYS * (LATENT + SHAPE.rest) * 2)
            for box in gl.static_range(KEYS // SHAPE.box):
                for chunk in gl.static_range(LATENT // CHUNK):
                    part = latents.index(stage).slice(box * SHAPE.box, SHAPE.box, dim=0)
                    part = part.slice(chunk * CHUNK, CHUNK, dim=1)
                    copy_async(k_desc, [rows[box], chunk * CHUNK], full.index(stage), part)
                part = rests.index(stage).slice(box * SHAPE.box, SHAPE.box, dim=0)
                copy_async(k_desc, [rows[box], LATENT], full.index(stage), part)
            use += 1
        position = stop
        origin += tiles
        context += 1
        sequence, seq_len = _load_context(schedule, context, batch)


@gluon.jit
def _load_queries(q_ptr, strides, sequence, first_head, first, target, SHAPE: gl.constexpr):
    """Entries first... of a program's heads, to shared memory; zeros for heads that there are not."""
    WIDTH: gl.constexpr = target.shape[1]
    LANES: gl.constexpr = min(32, WIDTH // 8)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    head = first_head + gl.arange(0, SHAPE.columns, layout=gl.SliceLayout(1, LAYOUT))
    entry = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))
    pointers = q_ptr + sequence.to(gl.int64) * strides[0] + first + head[:, None] * strides[1] + entry[None, :]
    target.store(gl.load(pointers, mask=(head < SHAPE.heads)[:, None] & (entry < WIDTH)[None, :], other=0.0))


@gluon.jit
def _zero_past_end(tile, count):
    """Zero the rows of a tile in shared memory from row `count` on."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    inside = gl.arange(0, KEYS, layout=gl.SliceLayout(1, LAYOUT)) < count
    for chunk in gl.static_range(tile.shape[1] // CHUNK):
        part = tile.slice(chunk * CHUNK, CHUNK, dim=1)
        values = part.load(LAYOUT)
        part.store(gl.where(inside[:, None], values, gl.zeros_like(values)))


@gluon.jit
def _blocks(acc):
    """Its parts of CHUNK rows, from the first on."""
    LAYOUT: gl.constexpr = acc.type.layout
    if acc.shape[0] > CHUNK:
        top, bottom = acc.reshape([2, acc.shape[0] // 2, acc.shape[1]]).permute((1, 2, 0)).split()
        return _blocks(gl.convert_layout(top, LAYOUT)) + _blocks(gl.convert_layout(bottom, LAYOUT))
    else:
        return (acc,)


@gluon.jit
def _store(values, staged, pointer, stride_head, first_head, SHAPE: gl.constexpr):
    """Store values [L, columns] of a program's heads from `pointer` on: through shared memory, a part after the other,
    so that threads write 16 bytes.
    """
    LANES: gl.constexpr = CHUNK // 4
    WIDE: gl.constexpr = gl.BlockedLayout([1, 4], [32 // LANES, LANES], [4, 1], [1, 0])
    head = first_head + gl.arange(0, SHAPE.columns, layout=gl.SliceLayout(1, WIDE))
    offsets = (head * stride_head)[:, None] + gl.arange(0, CHUNK, layout=gl.SliceLayout(0, WIDE))[None, :]
    inside = (head < SHAPE.heads)[:, None]
    parts = _blocks(values)
    for i in gl.static_range(len(parts)):
        staged.store(parts[i].permute((1, 0)))
        part = staged.load(WIDE)
        gl.store(pointer + i * CHUNK + offsets, part.to(pointer.dtype.element_ty), mask=inside)


@gluon.jit
def _zero_padding_rows(out_ptr, seq_lens, strides, staged, first_head, batch, SHAPE: gl.constexpr):
    """As `decode_kernel._zero_padding_rows`."""
    LATENT: gl.constexpr = SHAPE.latent
    COLUMNS: gl.constexpr = SHAPE.columns
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    row = gl.program_id(1)
    while row < batch:
        if gl.load(seq_lens + row) == 0:
            zeros = gl.zeros([LATENT, COLUMNS], gl.float32, layout=LAYOUT)
            _store(zeros, staged, out_ptr + row.to(gl.int64) * strides[0], strides[1], first_head, SHAPE)
        row += gl.num_programs(1)


@gluon.jit
def _consume(q_ptr, out_ptr, shared, ring, schedule, seq_lens, strides, unit, batch, SHAPE: gl.constexpr):
    q_strides, out_strides = strides
    q_smem, q_rest, weights_smem, staged = shared
    latents, rests, full, free = ring
    LATENT: gl.constexpr = SHAPE.latent
    COLUMNS: gl.constexpr = SHAPE.columns
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    gdc_wait()
    gdc_launch_dependents()
    place, found, has_padding = _load_range(schedule)
    context, position, end = place
    sequence, seq_len, origin = found
    first_head = gl.program_id(0) * COLUMNS
    head = first_head + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT))
    row = gl.arange(0, KEYS, layout=gl.SliceLayout(1, LAYOUT))
    if has_padding > 0:
        _zero_padding_rows(out_ptr, seq_lens, out_strides, staged, first_head, batch, SHAPE)
    use = position * 0
    first_position = position
    while position < end:
        tiles = gl.cdiv(seq_len, KEYS)
        stop = gl.minimum(end, origin + tiles)
        _load_queries(q_ptr, q_strides, sequence, first_head, 0, q_smem, SHAPE)
        _load_queries(q_ptr, q_strides, sequence, first_head, LATENT, q_rest, SHAPE)
        hopper.fence_async_shared()
        peak = gl.full([COLUMNS], float("-inf"), gl.float32, layout=gl.SliceLayout(0, LAYOUT))
        totals = gl.zeros([KEYS, COLUMNS], gl.float32, layout=LAYOUT)
        acc = gl.zeros([LATENT, COLUMNS], gl.float32, layout=LAYOUT)
        for tile in range(position - origin, stop - origin):
            stage = use % STAGES
            left = seq_len - tile * KEYS
            hopper.mbarrier.wait(full.index(stage), use // STAGES % 2)
            scores = gl.zeros([KEYS, COLUMNS], gl.float32, layout=LAYOUT)
            scores = hopper.warpgroup_mma(
                latents.index(stage), q_smem.permute((1, 0)), scores, use_acc=False, is_async=True
            )
            scores = hopper.warpgroup_mma(rests.index(stage), q_rest.permute((1, 0)), scores, is_async=True)
            scores = hopper.warpgroup_mma_wait(0, deps=(scores,))
            scores = gl.where((row < left)[:, None], scores, float("-inf"))
            # Every tile holds a key, so the peak is finite from the first one on.
            new_peak = gl.maximum(peak, gl.max(scores, 0) * unit)
            weights = gl.exp2(scores * unit - new_peak[None, :])
            decay = gl.exp2(peak - new_peak)
            totals = totals * decay[None, :] + weights  # added up over keys at the end only
            peak = new_peak
            weights_smem.store(weights.to(weights_smem.dtype))
            if left < KEYS:
                # Unwritten slots can hold NaN, which a weight of zero does not hide.
                _zero_past_end(latents.index(stage), left)
            hopper.fence_async_shared()
            acc = acc * decay[None, :]
            acc = hopper.warpgroup_mma(latents.index(stage).permute((1, 0)), weights_smem, acc, is_async=True)
            acc = hopper.warpgroup_mma_wait(0, deps=(acc,))
            hopper.mbarrier.arrive(free.index(stage))
            use += 1
        total = gl.sum(totals, 0)
        values = acc / total[None, :]
        begins = origin >= first_position
        if begins & (stop == origin + tiles):
            out = out_ptr + sequence.to(gl.int64) * out_strides[0]
            _store(values, staged, out, out_strides[1], first_head, SHAPE)
        else:
            part = (gl.program_id(1) * 2 + begins.to(gl.int32)).to(gl.int64) * SHAPE.heads
            _store(values, staged, schedule.partials + part * LATENT, LATENT, first_head, SHAPE)
            gl.store(schedule.lse + part + head, peak + gl.log2(total), mask=head < SHAPE.heads)
        position = stop
        origin += tiles
        context += 1
        sequence, seq_len = _load_context(schedule, context, batch)


@gluon.jit(do_not_specialize=[*Contexts._fields, "stride_table", "batch"])
def _latent_hopper_kernel(
    q_ptr,
    k_desc,
    block_tables,
    seq_lens,
    schedule,
    out_ptr,
    strides,
    stride_table,
    rows_per_block,
    batch,
    unit,
    SHAPE: gl.constexpr,
):
    """strides: of a row and of a head, of q and of out. unit: factor of the products, in units of
    log2(e).
    """
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout(min(128, SHAPE.columns * 2), 16, 2)
    q_smem = gl.allocate_shared_memory(DTYPE, [SHAPE.columns, SHAPE.latent], SHARED)
    q_rest = gl.allocate_shared_memory(DTYPE, [SHAPE.columns, SHAPE.rest], SHARED)
    weights = gl.allocate_shared_memory(DTYPE, [KEYS, SHAPE.columns], WEIGHTS)
    staged = gl.allocate_shared_memory(gl.float32, [SHAPE.columns, CHUNK], gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
    shared = (q_smem, q_rest, weights, staged)
    latents = gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, SHAPE.latent], SHARED)
    rests = gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, SHAPE.rest], SHARED)
    ring = (latents, rests, barriers(STAGES, 1), barriers(STAGES, 1))
    hopper.fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (q_ptr, out_ptr, shared, ring, schedule, seq_lens, strides, unit, batch, SHAPE)),
            (_produce, (k_desc, ring, schedule, block_tables, rows_per_block, stride_table, batch, SHAPE)),
        ],
        [1],
        [PRODUCER],
    )


def decode(
    q: Tensor, cache: KVCache, contexts: Contexts, scale: float, schedule: DecodeSchedule, rows: int, out: Tensor
) -> None:
    """Write attention to `out` or, of sequences that are cut, parts to the schedule. rows: heads of a program.

    The arguments are checked, and `schedule.hopper_takes` them.
    """
    num_blocks, _, block_size, width = cache.k.shape
    latent = cache.v.shape[3]
    stride_block, _, stride_slot, _ = cache.k.stride()
    rows_per_block = stride_block // stride_slot
    slots = (num_blocks - 1) * rows_per_block + block_size
    box = min(block_size & -block_size, KEYS.value)  # the largest power of two that divides a block and a tile
    k_desc = TensorDescriptor(cache.k, [slots, width], [stride_slot, 1], [box, CHUNK.value], SHARED.value)
    heads = q.shape[1]
    shape = Shape(heads, rows, latent, width - latent, block_size, box)
    launch(_latent_hopper_kernel, (-(-heads // rows), schedule.ranges.shape[0]))(
        q,
        k_desc,
        *contexts,
        schedule,
        out,
        (q.stride()[:2], out.stride()[:2]),
        contexts.block_tables.stride(0),
        rows_per_block,
        q.shape[0],
        scale * LOG2E,
        SHAPE=shape,
        num_warps=4,
        maxnreg=REGISTERS,
        launch_pdl=True,
    )
