"""The kernels as the engine calls them: CUDA tensors go to Triton, CPU tensors to the torch reference.

Nothing falls back: on CUDA a missing or failing Triton is an error. Every function checks its arguments and raises
ValueError naming the one at fault; none reads tensor contents on a CUDA device, so none synchronises with it and all
can be captured in a CUDA graph.

Names of dimensions: T tokens, B sequences, Hq query heads, Hkv KV heads (Hq a multiple of Hkv), D head size (up to 256;
sizes that are no power of two are padded on chip). The KV cache of a layer is two tensors
[num_blocks, Hkv, block_size, D] of equal strides, usually slices of one pool; block_size is any positive integer.
Dtypes are fp32, fp16 and bf16. A cache may also be in fp8, float8_e4m3fn or float8_e5m2, of an even head size, if the
device has it: Triton needs compute capability 8.9 for e4m3. It then comes with `kv_scales`, a `KVScales` of a number
for each KV head by which stored keys and values are multiplied (`kv_format.py`); for other caches they are None.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from . import reference
from .decode_work import DecodeSchedule
from .kv_format import KVScales
from .reference_sampling import NO_TOKEN


@cache
def _triton_kernels() -> ModuleType:
    # Not at the top: an install for CPUs has no triton.
    return import_module(".triton_kernels", __package__)


def _kernels_for(tensor: Tensor) -> ModuleType:
    device = tensor.device.type
    if device == "cuda":
        return _triton_kernels()
    if device == "cpu":
        return reference
    raise ValueError(f"no kernels for tensors on {tensor.device}")


def prepare(device: torch.device) -> None:
    """Allocate what kernels keep between calls on `device`, which the first one that needs it does otherwise.

    To be called before a pool of memory is in use that captured graphs share with others: what is allocated from it
    after a capture may lie where the graph, when it is replayed, puts its temporary tensors.
    """
    if device.type == "cuda":
        import_module(".linear", __package__).prepare(device)


def compile_only() -> AbstractContextManager[None]:
    """Within, kernels that are called on CUDA tensors are compiled, side by side, and not run.

    What they would return has its shape but no content. For one thread, while no other one calls kernels.
    """
    context: AbstractContextManager[None] = import_module(".compile_ahead", __package__).compile_only()
    return context


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    kv_scales: KVScales | None = None,
) -> None:
    """Write the keys and values of T tokens into their slots of the cache, in place.

    key, value: [T, Hkv, D] in the cache's dtype, or for an fp8 cache in any other, last dimension contiguous (slices of
    a fused qkv tensor will do).
    slot_mapping: [T] int64, slot = block * block_size + offset; negative for a padding token, which is skipped. Two
    tokens never name the same slot.
    """
    _kernels_for(key).reshape_and_cache(key, value, k_cache, v_cache, slot_mapping, kv_scales=kv_scales)


def copy_blocks(pool: Tensor, src: Tensor, dst: Tensor) -> None:
    """pool[dst] = pool[src] for N whole blocks in one launch, in place.

    pool: [num_blocks, ...] of any dtype, contiguous within a block. src, dst: [N] int64. No block may be both a
    source and a destination of one call, nor a destination twice: the copies run in no order.
    """
    _kernels_for(pool).copy_blocks(pool, src, dst)


def paged_decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    alibi_slopes: Tensor | None = None,
    soft_cap: float | None = None,
    kv_scales: KVScales | None = None,
    schedule: DecodeSchedule | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of one new token per sequence over its cached context -> [B, Hq, D] in q's dtype (`out` if given).

    q: [B, Hq, D], last dimension contiguous. block_tables: [B, max_blocks] int32. seq_lens: [B] int32, context length
    with the new token, whose key and value are already cached; 0 marks a padding row, whose output is zero.
    scale: factor of the scores, positive. sliding_window: the query at p attends to keys in (p - window, p]; blocks
    wholly before that are not read, and their table entries may hold anything. alibi_slopes: [Hq] fp32, adds
    slope * (key position - query position). soft_cap: s -> cap * tanh(s / cap), after the scale, before ALiBi and mask.
    schedule: of `decode_schedule` for these seq_lens, this window and caches of this dtype; None makes one for this
    call. Calls that share a schedule, which holds scratch space, must follow one another in one stream.
    """
    return _kernels_for(q).paged_decode_attention(
        q,
        k_cache,
        v_cache,
        block_tables,
        seq_lens,
        scale=scale,
        sliding_window=sliding_window,
        alibi_slopes=alibi_slopes,
        soft_cap=soft_cap,
        kv_scales=kv_scales,
        schedule=schedule,
        out=out,
    )


def decode_schedule(
    q: Tensor, k_cache: Tensor, seq_lens: Tensor, *, sliding_window: int | None = None, num_ranges: int | None = None
) -> DecodeSchedule:
    """Cut the work of `paged_decode_attention` on these seq_lens into equal ranges, once for all layers of one shape.

    q: [B, Hq, D] and k_cache: [num_blocks, Hkv, block_size, D] of any layer; their contents are not used. seq_lens:
    [B] int32. num_ranges: None fills the device once.
    """
    return _kernels_for(q).decode_schedule(q, k_cache, seq_lens, sliding_window=sliding_window, num_ranges=num_ranges)


def paged_prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    *,
    scale: float,
    sliding_window: int | None = None,
    alibi_slopes: Tensor | None = None,
    soft_cap: float | None = None,
    kv_scales: KVScales | None = None,
    deterministic: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of a chunk of new tokens per sequence over its context -> [T, Hq, D] in q's dtype.

    q: [T, Hq, D], the chunks packed one after the other, last dimension contiguous. query_start_loc: [B + 1] int32,
    chunk b is rows query_start_loc[b] to query_start_loc[b + 1]; chunks may have any length, 0 and 1 included.
    max_query_len: int, at least the longest chunk's length (queries beyond it are not computed). seq_lens: [B] int32,
    context length with the chunk, whose keys and values are already cached: query i of chunk b is at position
    seq_lens[b] - chunk length + i. The rest as for `paged_decode_attention`. Rows of q outside every chunk, and those
    of a sequence of length 0, are not computed: they keep what `out` held, or are unspecified if `out` is not given.
    deterministic: a query's result depends on its context alone, to the bit, and not on how its sequence is cut into
    chunks or what else is in the batch. Slower for short chunks.
    On Hopper GPUs, long chunks without window, slopes or soft cap and with a cache in q's dtype have a kernel of their
    own (`paged_prefill_hopper.py`); all others, fp8 caches among them, go to the general one.
    """
    return _kernels_for(q).paged_prefill_attention(
        q,
        k_cache,
        v_cache,
        block_tables,
        seq_lens,
        query_start_loc,
        max_query_len,
        scale=scale,
        sliding_window=sliding_window,
        alibi_slopes=alibi_slopes,
        soft_cap=soft_cap,
        kv_scales=kv_scales,
        deterministic=deterministic,
        out=out,
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps) over the last dimension -> a new contiguous tensor.

    x: [..., D], last dimension contiguous; up to 3 dimensions of any stride, more if contiguous. weight: [D] in x's
    dtype. fp32 inside; the quotient is rounded to x's dtype before the product with weight, as in transformers' Llama.
    """
    return _kernels_for(x).rms_norm(x, weight, eps)


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual), two new tensors; neither argument is changed.

    x, residual: [..., D] of one shape and dtype, strides as for `rms_norm`. The sum is rounded to x's dtype first.
    """
    return _kernels_for(x).fused_add_rms_norm(x, residual, weight, eps)


def rotary_embedding(positions: Tensor, q: Tensor, k: Tensor, cos_sin_cache: Tensor) -> None:
    """Rotate the first rotary_dim entries of every query and key head by their position's angles, in place.

    positions: [T] int64, each below max_pos (padding rows too). q: [T, Hq, D], k: [T, Hkv, D], last dimension
    contiguous. cos_sin_cache: [max_pos, rotary_dim] fp32, cos in the first half, sin in the second; half-split pairs.
    """
    _kernels_for(q).rotary_embedding(positions, q, k, cos_sin_cache)


def silu_and_mul(x: Tensor) -> Tensor:
    """silu(x[..., :d]) * x[..., d:] for x [..., 2d], strides as for `rms_norm` -> a new tensor [..., d]."""
    return _kernels_for(x).silu_and_mul(x)


def gumbel_argmax(logits: Tensor, seeds: Tensor, positions: Tensor, temperature: Tensor, noise_scale: Tensor) -> Tensor:
    """Draw one token a row: argmax of logits / temperature + noise_scale * noise(seed, position) -> [N] int64.

    logits: [N, V] fp32, fp16 or bf16, rows of any stride; -inf is never drawn unless a row has nothing else. seeds: [N]
    int64 >= 0. positions: [N] int64, index of the token to draw in its sequence. temperature: [N] fp32, > 0.
    noise_scale: [N] fp32, 1 to draw, 0 for a plain argmax. The noise depends on seed, position and token alone.
    """
    return _kernels_for(logits).gumbel_argmax(logits, seeds, positions, temperature, noise_scale)


def truncate_draws(
    token_ids: Tensor,
    logits: Tensor,
    rows: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    log_min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperature: Tensor,
) -> None:
    """Make tokens drawn by `gumbel_argmax` draws from what top_k, top_p and min_p keep of their rows, in place.

    token_ids: [N] int64, its result. logits, seeds, positions, temperature: its arguments; noise_scale was 1 in the
    rows that are cut. rows: [C] int64, these rows, none twice. top_k: [C] int64, 1 to V, or 0 for all. top_p: [C] fp32,
    1 for all. log_min_p: [C] fp32, log of min_p, -inf for all. `reference_truncation` says what each keeps: tokens of
    equal logit together, and always the most likely ones. A row with neutral values keeps its token.
    """
    _kernels_for(logits).truncate_draws(token_ids, logits, rows, top_k, top_p, log_min_p, seeds, positions, temperature)


def penalise(
    logits: Tensor,
    token_table: Tensor,
    rows: Tensor,
    table_rows: Tensor,
    num_prompt_tokens: Tensor,
    num_tokens: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """Change the logits of the tokens that P sequences already have, in place.

    A token of prompt or output has its logit divided by `repetition` if positive, else multiplied; then one of the
    output loses frequency * its count there + presence. What overflows becomes the largest number. logits: [N, V] fp32.
    rows: [P] int64, theirs in logits, none twice. token_table: [R, L] int32. table_rows: [P] int64, theirs in it.
    num_prompt_tokens, num_tokens: [P] int64; entries from num_tokens on, and ids that are not 0 to V - 1, do not count.
    repetition, presence, frequency: [P] fp32; 1, 0 and 0 change nothing.
    """
    _kernels_for(logits).penalise(
        logits, token_table, rows, table_rows, num_prompt_tokens, num_tokens, repetition, presence, frequency
    )


def gather_logprobs(
    logits: Tensor, rows: Tensor, token_ids: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(log-probabilities [M] fp32, ranks [M] int64, top ids [M, K] int64, their log-probabilities [M, K] fp32).

    logits: [N, V] fp32, fp16 or bf16; -inf allowed, but not for a whole row. rows: [M] int64, the rows to report on.
    token_ids: [M] int64, the chosen token of each; a rank is 1 + the number of tokens of higher logit. num_top: K, 0 to
    V, made for a few; top ids have the most likely first, and lower ids first among equals.
    """
    return _kernels_for(logits).gather_logprobs(logits, rows, token_ids, num_top)


def gumbel_keys(
    logits: Tensor, seeds: Tensor, positions: Tensor, temperature: Tensor, noise_scale: Tensor, *, first_token: int
) -> Tensor:
    """`gumbel_argmax` over slices of a vocabulary: the best of one slice as a key [N] int64.

    logits: [N, C] of tokens first_token to first_token + C - 1; the rest as for `gumbel_argmax`. The largest key of all
    slices is that of the token that `gumbel_argmax` draws from the whole; `tokens_of_keys` names it.
    """
    return _kernels_for(logits).gumbel_keys(logits, seeds, positions, temperature, noise_scale, first_token=first_token)


def tokens_of_keys(keys: Tensor) -> Tensor:
    """The tokens of `gumbel_keys`, int64."""
    return NO_TOKEN - (keys & NO_TOKEN)


def decode_inputs(
    rows: Tensor,
    positions: Tensor,
    token_table: Tensor,
    block_table: Tensor,
    block_size: int,
    *,
    input_ids: Tensor,
    slots: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
) -> None:
    """Gather a decode step's inputs from the persistent batch, into the four keyword arguments.

    rows, positions: [B] int64; position -1 marks padding, which gets id 0, slot -1 and length 0. token_table:
    [R, max_len] int32. block_table: [R, max_blocks] int32. input_ids, slots: [B] int64. seq_lens: [B] int32.
    block_tables: [B, max_blocks] int32; entries past a sequence's blocks are left as they were.
    """
    _kernels_for(rows).decode_inputs(
        rows,
        positions,
        token_table,
        block_table,
        block_size,
        input_ids=input_ids,
        slots=slots,
        seq_lens=seq_lens,
        block_tables=block_tables,
    )


def qk_norm_rope_cache(
    qkv: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    num_heads: int,
    num_kv_heads: int,
    *,
    kv_scales: KVScales | None = None,
    deterministic: bool = False,
) -> Tensor:
    """From the qkv projection to attention in one launch -> queries [T, Hq, D], a new contiguous tensor.

    `rms_norm` of each query and key head (only if q_weight and k_weight, [D] each, are given), `rotary_embedding` of
    both, `reshape_and_cache` of keys and values, with the roundings of the three in sequence. qkv: [T, (Hq + 2 Hkv) D]
    in the cache's dtype (or any, for an fp8 cache), heads in the order q, k, v, last dimension contiguous; not changed.
    The rest as for those.
    deterministic: a token's bits do not depend on the number of tokens. Slower for few.
    """
    return _kernels_for(qkv).qk_norm_rope_cache(
        qkv,
        positions,
        cos_sin_cache,
        q_weight,
        k_weight,
        eps,
        k_cache,
        v_cache,
        slot_mapping,
        num_heads,
        num_kv_heads,
        kv_scales=kv_scales,
        deterministic=deterministic,
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """x W^T + bias -> [T, out], a new tensor or the contiguous `out`; made for few tokens and right for any number.

    x: [T, in], weight: [out, in], last dimensions contiguous; bias: [out]. Sums are fp32, rounded once, in an order
    that depends on shapes alone: equal calls give equal results.
    """
    return _kernels_for(x).linear(x, weight, bias, out=out)


def linear_invariant(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias -> a new tensor [T, out], each row of which depends on its row of x and on W alone, to the bit.

    So a row is the same in any batch, at any place in it. Arguments as for `linear`. Slower than that; on the CPU,
    where rows are multiplied one by one, much slower for many tokens.
    """
    return _kernels_for(x).linear_invariant(x, weight, bias)


def linear_silu_mul(x: Tensor, weight: Tensor) -> Tensor:
    """silu(x G^T) * (x U^T) -> a new tensor [T, out], where weight is [2 * out, in], the rows of G before those of U.

    x: [T, in], last dimensions contiguous. By this package's kernels everything is fp32 and rounded once; elsewhere,
    and on the CPU, it is `silu_and_mul` of the rounded product.
    """
    return _kernels_for(x).linear_silu_mul(x, weight)


def add_rms_norm_linear(
    x: Tensor, residual: Tensor | None, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(norm(total) W^T + bias, total), total = x + residual rounded to x's dtype; x itself if residual is None.

    x, residual: [T, in]; norm_weight: [in]; the rest as for `linear` and `fused_add_rms_norm`. For very few tokens one
    launch, in which the norm is not rounded before the product.
    """
    return _kernels_for(x).add_rms_norm_linear(x, residual, norm_weight, eps, weight, bias)


def add_rms_norm_linear_silu_mul(
    x: Tensor, residual: Tensor | None, norm_weight: Tensor, eps: float, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """(`linear_silu_mul`(norm(total), weight), total); as for `add_rms_norm_linear`."""
    return _kernels_for(x).add_rms_norm_linear_silu_mul(x, residual, norm_weight, eps, weight)
