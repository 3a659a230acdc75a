"""Penalties of the tokens that a sequence already has, on its entries of the logits alone.

One program a sequence goes over its tokens three times. Counts live in a scratch row of the vocabulary's size of which
only the entries of these tokens are ever touched: each is set to 1, then incremented for every output token, then taken
by whichever place of the token is first to exchange it for 0. So each distinct token is changed once, in any order.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .checks_sampling import check_penalise

TILE = 1024
LARGEST = tl.constexpr(torch.finfo(torch.float32).max)


@triton.jit
def _load_tokens(token_ptr, start, num_tokens, vocab_size, TILE: tl.constexpr):
    """Token ids of a tile of places, and which of them are known tokens of the vocabulary."""
    place = start + tl.arange(0, TILE)
    token = tl.load(token_ptr + place, mask=place < num_tokens, other=-1)
    return token, (token >= 0) & (token < vocab_size)


@triton.jit(
    do_not_specialize=[
        "rows_ptr",
        "table_rows_ptr",
        "num_prompt_ptr",
        "num_tokens_ptr",
        "repetition_ptr",
        "presence_ptr",
        "frequency_ptr",
    ]
)
def _penalise_kernel(
    logits_ptr,
    token_table_ptr,
    rows_ptr,
    table_rows_ptr,
    num_prompt_ptr,
    num_tokens_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    counts_ptr,
    stride_row,
    stride_table,
    vocab_size,
    TILE: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    logits_ptr += tl.load(rows_ptr + place) * stride_row
    token_ptr = token_table_ptr + tl.load(table_rows_ptr + place) * stride_table
    counts_ptr += place * vocab_size
    num_prompt, num_tokens = tl.load(num_prompt_ptr + place), tl.load(num_tokens_ptr + place)
    repetition = tl.load(repetition_ptr + place)
    presence, frequency = tl.load(presence_ptr + place), tl.load(frequency_ptr + place)

    for start in range(0, num_tokens, TILE):
        token, known = _load_tokens(token_ptr, start, num_tokens, vocab_size, TILE)
        tl.store(counts_ptr + token, 1, mask=known)
    tl.debug_barrier()
    for start in range(num_prompt, num_tokens, TILE):
        token, known = _load_tokens(token_ptr, start, num_tokens, vocab_size, TILE)
        tl.atomic_add(counts_ptr + token, 1, mask=known, sem="relaxed")
    tl.debug_barrier()
    for start in range(0, num_tokens, TILE):
        token, known = _load_tokens(token_ptr, start, num_tokens, vocab_size, TILE)
        count = tl.atomic_xchg(counts_ptr + token, 0, mask=known, sem="relaxed")
        mine = known & (count > 0)
        logit = tl.load(logits_ptr + token, mask=mine, other=0.0)
        logit = tl.where(logit > 0, tl.div_rn(logit, tl.zeros_like(logit) + repetition), logit * repetition)
        logit -= frequency * (count - 1).to(tl.float32)
        logit -= tl.where(count > 1, presence, 0.0)
        tl.store(logits_ptr + token, tl.minimum(logit, LARGEST), mask=mine)


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
    """Change the logits of seen tokens, in place; see `ops.penalise` for the contract."""
    check_penalise(
        logits, token_table, rows, table_rows, num_prompt_tokens, num_tokens, repetition, presence, frequency
    )
    count, vocab_size = rows.shape[0], logits.shape[1]
    if not count:
        return
    counts = torch.empty((count, vocab_size), dtype=torch.int32, device=logits.device)
    _penalise_kernel[(count,)](
        logits,
        token_table,
        rows,
        table_rows,
        num_prompt_tokens,
        num_tokens,
        repetition,
        presence,
        frequency,
        counts,
        logits.stride(0),
        token_table.stride(0),
        vocab_size,
        TILE=TILE,
        num_warps=8,
        enable_fp_fusion=False,
    )
