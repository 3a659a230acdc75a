"""Argument checks that the Triton launchers and the torch references share.

Each raises ValueError whose message begins with the name of the offending argument. None of them reads tensor
contents, so none synchronises with a device. They run before every launch: messages are built only on failure.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from .decode_work import DecodeSchedule
from .kv_format import FP8_MAX, KVScales, is_fp8

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FLOAT_RULE = "must be float32, float16 or bfloat16"
MAX_HEAD_DIM = 256


def fail(argument: str, rule: str, got: object) -> NoReturn:
    """Raise ValueError "<argument> <rule>, got <got>"; shapes and strides print as tuples."""
    raise ValueError(f"{argument} {rule}, got {tuple(got) if isinstance(got, tuple) else got}")


def check_like(tensor: Tensor, argument: str, other: Tensor, other_argument: str) -> None:
    """`tensor` must share dtype and device with `other`."""
    if tensor.dtype != other.dtype:
        fail(argument, f"must have the dtype of {other_argument}, {other.dtype}", tensor.dtype)
    if tensor.device != other.device:
        fail(argument, f"must be on the device of {other_argument}, {other.device}", tensor.device)


def check_last_dim(tensor: Tensor, argument: str) -> None:
    """The last dimension of `tensor` must be contiguous; the others may have any stride."""
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        fail(argument, "must have stride 1 in its last dimension", tensor.stride())


def check_vector(tensor: Tensor, argument: str, length: int, dtype: torch.dtype, device: torch.device) -> None:
    """`tensor` must be a contiguous [length] tensor of this dtype and device."""
    if tensor.dim() != 1 or tensor.shape[0] != length:
        fail(argument, f"must have shape ({length},)", tensor.shape)
    if tensor.dtype != dtype:
        fail(argument, f"must be {dtype}", tensor.dtype)
    if tensor.device != device:
        fail(argument, f"must be on {device}", tensor.device)
    if not tensor.is_contiguous():
        fail(argument, "must be contiguous", tensor.stride())


def check_cache(k_cache: Tensor, v_cache: Tensor) -> None:
    """Both caches must be [num_blocks, num_kv_heads, block_size, head_dim] with the same strides, the last of them 1.

    Equal strides hold for two slices of one pool and for two contiguous tensors; they let a kernel compute one
    offset for both.
    """
    if k_cache.dim() != 4:
        fail("k_cache", "must be [num_blocks, num_kv_heads, block_size, head_dim]", k_cache.shape)
    if k_cache.dtype not in FLOAT_DTYPES and k_cache.dtype not in FP8_MAX:
        fail("k_cache", "must be float32, float16, bfloat16, float8_e4m3fn or float8_e5m2", k_cache.dtype)
    check_last_dim(k_cache, "k_cache")
    if is_fp8(k_cache):
        for argument, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
            layout = (cache.shape[3], *cache.stride()[:3], cache.storage_offset())
            if any(number % 2 for number in layout):
                fail(argument, "in fp8 must have an even head_dim, even strides and an even offset", layout)
    if v_cache.shape != k_cache.shape:
        fail("v_cache", f"must have the shape of k_cache, {tuple(k_cache.shape)}", v_cache.shape)
    if v_cache.stride() != k_cache.stride():
        fail("v_cache", f"must have the strides of k_cache, {k_cache.stride()}", v_cache.stride())
    check_like(v_cache, "v_cache", k_cache, "k_cache")


def check_format(tensor: Tensor, argument: str, k_cache: Tensor, kv_scales: KVScales | None) -> None:
    """`tensor` and the cache must be of one dtype, or the cache of an fp8 one: then, and only then, it has scales."""
    if not is_fp8(k_cache):
        check_like(tensor, argument, k_cache, "k_cache")
        if kv_scales is not None:
            fail("kv_scales", f"must be None for a cache of {k_cache.dtype}", kv_scales)
        return
    if tensor.dtype not in FLOAT_DTYPES:
        fail(argument, FLOAT_RULE, tensor.dtype)
    if tensor.device != k_cache.device:
        fail(argument, f"must be on the device of k_cache, {k_cache.device}", tensor.device)
    if kv_scales is None:
        fail("kv_scales", f"must be given for a cache of {k_cache.dtype}", kv_scales)
    check_vector(kv_scales.k, "kv_scales.k", k_cache.shape[1], torch.float32, k_cache.device)
    check_vector(kv_scales.v, "kv_scales.v", k_cache.shape[1], torch.float32, k_cache.device)


def check_paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    sliding_window: int | None,
    alibi_slopes: Tensor | None,
    soft_cap: float | None,
    out: Tensor | None,
    kv_scales: KVScales | None,
) -> None:
    """What decode and prefill have in common; the batch size is taken from `seq_lens`."""
    check_cache(k_cache, v_cache)
    kv_heads, _, head_dim = k_cache.shape[1:]
    if q.dim() != 3:
        fail("q", "must have 3 dimensions", q.shape)
    if q.shape[2] != head_dim:
        fail("q", f"must have the head_dim of k_cache, {head_dim}", q.shape)
    if head_dim > MAX_HEAD_DIM:
        fail("q", f"must have a head_dim of at most {MAX_HEAD_DIM}", q.shape)
    if q.shape[1] % kv_heads != 0:
        fail("q", f"must have a multiple of {kv_heads} heads", q.shape)
    check_format(q, "q", k_cache, kv_scales)
    check_last_dim(q, "q")
    check_vector(seq_lens, "seq_lens", seq_lens.numel(), torch.int32, q.device)
    if block_tables.dim() != 2 or block_tables.shape[0] != seq_lens.shape[0]:
        fail("block_tables", f"must be [{seq_lens.shape[0]}, max_blocks]", block_tables.shape)
    if block_tables.dtype != torch.int32:
        fail("block_tables", "must be torch.int32", block_tables.dtype)
    if block_tables.device != q.device:
        fail("block_tables", f"must be on {q.device}", block_tables.device)
    check_last_dim(block_tables, "block_tables")
    if scale <= 0.0:
        fail("scale", "must be positive", scale)
    if sliding_window is not None and sliding_window < 1:
        fail("sliding_window", "must be at least 1 or None", sliding_window)
    if soft_cap is not None and soft_cap <= 0.0:
        fail("soft_cap", "must be positive or None", soft_cap)
    if alibi_slopes is not None:
        check_vector(alibi_slopes, "alibi_slopes", q.shape[1], torch.float32, q.device)
    if out is not None:
        if out.shape != q.shape:
            fail("out", f"must have the shape of q, {tuple(q.shape)}", out.shape)
        check_like(out, "out", q, "q")
        check_last_dim(out, "out")


def check_paged_decode(q: Tensor, seq_lens: Tensor, schedule: DecodeSchedule | None) -> None:
    if q.shape[0] != seq_lens.shape[0]:
        fail("q", f"must have one row per sequence, {seq_lens.shape[0]}", q.shape)
    if schedule is None:
        return
    heads, head_dim = q.shape[1:]
    if schedule.partials.shape[1:] != (heads, head_dim) or schedule.contexts.shape[0] != q.shape[0]:
        made_for = (schedule.contexts.shape[0], *schedule.partials.shape[1:])
        fail("schedule", f"must be made for queries of shape {tuple(q.shape)}", made_for)
    if schedule.ranges.device != q.device:
        fail("schedule", f"must be on {q.device}", schedule.ranges.device)


def check_decode_schedule(
    q: Tensor, k_cache: Tensor, seq_lens: Tensor, sliding_window: int | None, num_ranges: int | None
) -> None:
    if q.dim() != 3:
        fail("q", "must have 3 dimensions", q.shape)
    if k_cache.dim() != 4:
        fail("k_cache", "must be [num_blocks, num_kv_heads, block_size, head_dim]", k_cache.shape)
    if q.shape[1] % k_cache.shape[1] != 0:
        fail("q", f"must have a multiple of {k_cache.shape[1]} heads", q.shape)
    check_vector(seq_lens, "seq_lens", q.shape[0], torch.int32, q.device)
    if sliding_window is not None and sliding_window < 1:
        fail("sliding_window", "must be at least 1 or None", sliding_window)
    if num_ranges is not None and num_ranges < 1:
        fail("num_ranges", "must be at least 1 or None", num_ranges)


def check_paged_prefill(q: Tensor, seq_lens: Tensor, query_start_loc: Tensor, max_query_len: int) -> None:
    check_vector(query_start_loc, "query_start_loc", seq_lens.shape[0] + 1, torch.int32, q.device)
    if max_query_len < 0:
        fail("max_query_len", "must not be negative", max_query_len)


def check_rows(x: Tensor, argument: str) -> None:
    """`x` must be a floating tensor of 1 to 3 dimensions (more if contiguous), its last dimension contiguous."""
    if x.dtype not in FLOAT_DTYPES:
        fail(argument, FLOAT_RULE, x.dtype)
    if x.dim() == 0:
        fail(argument, "must have at least one dimension", x.shape)
    if x.dim() > 3 and not x.is_contiguous():
        fail(argument, "of more than 3 dimensions must be contiguous", x.stride())
    check_last_dim(x, argument)


def row_layout(x: Tensor) -> tuple[int, int, int, int]:
    """The rows of a tensor that passed `check_rows`: (number of rows, rows per outer step, outer stride, inner stride).

    Row r starts at (r // inner) * outer_stride + (r % inner) * inner_stride elements.
    """
    if x.dim() == 3:
        return x.shape[0] * x.shape[1], max(x.shape[1], 1), x.stride(0), x.stride(1)
    if x.dim() == 2:
        return x.shape[0], max(x.shape[0], 1), 0, x.stride(0)
    rows = x.numel() // max(x.shape[-1], 1)
    return rows, max(rows, 1), 0, x.shape[-1]


def check_rms_norm(x: Tensor, weight: Tensor) -> None:
    check_rows(x, "x")
    check_vector(weight, "weight", x.shape[-1], x.dtype, x.device)


def check_residual(x: Tensor, residual: Tensor) -> None:
    if residual.shape != x.shape:
        fail("residual", f"must have the shape of x, {tuple(x.shape)}", residual.shape)
    check_like(residual, "residual", x, "x")
    check_rows(residual, "residual")


def check_silu_and_mul(x: Tensor) -> None:
    check_rows(x, "x")
    if x.shape[-1] % 2 != 0:
        fail("x", "must have an even last dimension", x.shape)


def check_rotary(positions: Tensor, q: Tensor, k: Tensor, cos_sin_cache: Tensor) -> None:
    if q.dim() != 3:
        fail("q", "must be [T, heads, head_dim]", q.shape)
    if q.dtype not in FLOAT_DTYPES:
        fail("q", FLOAT_RULE, q.dtype)
    check_last_dim(q, "q")
    tokens, _, head_dim = q.shape
    if k.dim() != 3 or k.shape[0] != tokens or k.shape[2] != head_dim:
        fail("k", f"must be [{tokens}, heads, {head_dim}]", k.shape)
    check_like(k, "k", q, "q")
    check_last_dim(k, "k")
    check_vector(positions, "positions", tokens, torch.int64, q.device)
    if cos_sin_cache.dim() != 2:
        fail("cos_sin_cache", "must be [max_pos, rotary_dim]", cos_sin_cache.shape)
    if cos_sin_cache.shape[1] % 2 != 0 or not 0 < cos_sin_cache.shape[1] <= head_dim:
        fail("cos_sin_cache", f"must have an even rotary_dim of 2 to {head_dim}", cos_sin_cache.shape)
    if cos_sin_cache.dtype != torch.float32:
        fail("cos_sin_cache", "must be torch.float32", cos_sin_cache.dtype)
    if cos_sin_cache.device != q.device:
        fail("cos_sin_cache", f"must be on {q.device}", cos_sin_cache.device)
    check_last_dim(cos_sin_cache, "cos_sin_cache")


def check_reshape_and_cache(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, kv_scales: KVScales | None
) -> None:
    check_cache(k_cache, v_cache)
    kv_heads, _, head_dim = k_cache.shape[1:]
    if key.dim() != 3 or key.shape[1] != kv_heads or key.shape[2] != head_dim:
        fail("key", f"must be [T, {kv_heads}, {head_dim}]", key.shape)
    if value.shape != key.shape:
        fail("value", f"must have the shape of key, {tuple(key.shape)}", value.shape)
    check_format(key, "key", k_cache, kv_scales)
    check_like(value, "value", key, "key")
    check_last_dim(key, "key")
    check_last_dim(value, "value")
    check_vector(slot_mapping, "slot_mapping", key.shape[0], torch.int64, key.device)


def check_qk_norm_rope_cache(
    qkv: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    num_heads: int,
    num_kv_heads: int,
    kv_scales: KVScales | None,
) -> None:
    check_cache(k_cache, v_cache)
    head_dim = k_cache.shape[3]
    if k_cache.shape[1] != num_kv_heads:
        fail("k_cache", f"must have {num_kv_heads} heads", k_cache.shape)
    width = (num_heads + 2 * num_kv_heads) * head_dim
    if qkv.dim() != 2 or qkv.shape[1] != width:
        fail("qkv", f"must be [T, {width}]", qkv.shape)
    check_format(qkv, "qkv", k_cache, kv_scales)
    check_last_dim(qkv, "qkv")
    heads = qkv.unflatten(1, (-1, head_dim))
    check_rotary(positions, heads, heads, cos_sin_cache)
    check_vector(slot_mapping, "slot_mapping", qkv.shape[0], torch.int64, qkv.device)
    if (q_weight is None) != (k_weight is None):
        fail("k_weight", "must be given exactly if q_weight is", k_weight)
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None:
            check_vector(weight, name, head_dim, qkv.dtype, qkv.device)


def check_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> None:
    if x.dim() != 2:
        fail("x", "must be [T, in]", x.shape)
    check_rows(x, "x")
    if weight.dim() != 2 or weight.shape[1] != x.shape[1]:
        fail("weight", f"must be [out, {x.shape[1]}]", weight.shape)
    check_like(weight, "weight", x, "x")
    check_last_dim(weight, "weight")
    if bias is not None:
        check_vector(bias, "bias", weight.shape[0], x.dtype, x.device)
    if out is not None:
        if out.shape != (x.shape[0], weight.shape[0]) or not out.is_contiguous():
            fail("out", f"must be [{x.shape[0]}, {weight.shape[0]}] and contiguous", out.shape)
        check_like(out, "out", x, "x")


def check_gated(weight: Tensor) -> None:
    if weight.shape[0] % 2 != 0:
        fail("weight", "must have an even number of rows, gate and up", weight.shape)


def check_norm_linear(x: Tensor, residual: Tensor | None, norm_weight: Tensor) -> None:
    """What `check_linear` leaves of a projection with a norm before it."""
    check_vector(norm_weight, "norm_weight", x.shape[1], x.dtype, x.device)
    if residual is not None:
        check_residual(x, residual)


def check_copy_blocks(pool: Tensor, src: Tensor, dst: Tensor) -> None:
    if pool.dim() < 2:
        fail("pool", "must be [num_blocks, ...]", pool.shape)
    if pool.shape[0] > 0 and not pool[0].is_contiguous():
        fail("pool", "must be contiguous within a block", pool.stride())
    check_vector(src, "src", src.numel(), torch.int64, pool.device)
    check_vector(dst, "dst", src.shape[0], torch.int64, pool.device)


def check_gumbel_argmax(
    logits: Tensor, seeds: Tensor, positions: Tensor, temperature: Tensor, noise_scale: Tensor, first_token: int = 0
) -> None:
    if logits.dim() != 2 or not logits.shape[1]:
        fail("logits", "must be [rows, vocab_size] of at least one column", logits.shape)
    if not 0 <= first_token < 1 << 31:
        fail("first_token", "must be at least 0 and below 2^31", first_token)
    if logits.dtype not in FLOAT_DTYPES:
        fail("logits", FLOAT_RULE, logits.dtype)
    check_last_dim(logits, "logits")
    rows, device = logits.shape[0], logits.device
    check_vector(seeds, "seeds", rows, torch.int64, device)
    check_vector(positions, "positions", rows, torch.int64, device)
    check_vector(temperature, "temperature", rows, torch.float32, device)
    check_vector(noise_scale, "noise_scale", rows, torch.float32, device)


def check_decode_inputs(
    rows: Tensor,
    positions: Tensor,
    token_table: Tensor,
    block_table: Tensor,
    input_ids: Tensor,
    slots: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
) -> None:
    count, device = rows.shape[0], rows.device
    check_vector(rows, "rows", count, torch.int64, device)
    check_vector(positions, "positions", count, torch.int64, device)
    check_vector(input_ids, "input_ids", count, torch.int64, device)
    check_vector(slots, "slots", count, torch.int64, device)
    check_vector(seq_lens, "seq_lens", count, torch.int32, device)
    for name, table in (("token_table", token_table), ("block_table", block_table), ("block_tables", block_tables)):
        if table.dim() != 2 or table.dtype != torch.int32:
            fail(name, "must be a 2-dimensional int32 tensor", (table.dtype, *table.shape))
        check_last_dim(table, name)
    if block_tables.shape != (count, block_table.shape[1]):
        fail("block_tables", f"must have shape ({count}, {block_table.shape[1]})", block_tables.shape)
