"""The Triton kernel of `penalise`.

    logit = logit / repetition if logit > 0 else logit * repetition, of every token of prompt or output
    logit = logit - frequency * count - presence, of every token of the output

logits [N, V] fp32, token_table [R, L] int32, the rest as in `PenaltyRows`.

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

from ..compile_ahead import launch
from .penalties import PenaltyRows

TILE = tl.constexpr(1024)
LARGEST = tl.constexpr(torch.finfo(torch.float32).max)


@triton.jit
def _load_tokens(token_ptr, start, num_tokens, vocab_size):
    """Token ids of a tile of places, and which of them are known tokens of the vocabulary."""
    place = start + tl.arange(0, TILE)
    token = tl.load(token_ptr + place, mask=place < num_tokens, other=-1)
    return token, (token >= 0) & (token < vocab_size)


@triton.jit(do_not_specialize=PenaltyRows._fields)
def _penalise_kernel(
    arrays, rows, table_rows, num_prompt_tokens, num_tokens, repetition, presence, frequency, strides, vocab_size
):
    """arrays: (logits, token table, counts [P, V] int32, scratch). strides: of the logits and the token table."""
    logits_ptr, token_table_ptr, counts_ptr = arrays
    place = tl.program_id(0).to(tl.int64)
    logits_ptr += tl.load(rows + place) * strides[0]
    token_ptr = token_table_ptr + tl.load(table_rows + place) * strides[1]
    counts_ptr += place * vocab_size
    prompt_end, end = tl.load(num_prompt_tokens + place), tl.load(num_tokens + place)
    factor = tl.load(repetition + place)
    once, each = tl.load(presence + place), tl.load(frequency + place)

    for start in range(0, end, TILE):
        token, known = _load_tokens(token_ptr, start, end, vocab_size)
        tl.store(counts_ptr + token, 1, mask=known)
    tl.debug_barrier()
    for start in range(prompt_end, end, TILE):
        token, known = _load_tokens(token_ptr, start, end, vocab_size)
        tl.atomic_add(counts_ptr + token, 1, mask=known, sem="relaxed")
    tl.debug_barrier()
    for start in range(0, end, TILE):
        token, known = _load_tokens(token_ptr, start, end, vocab_size)
        count = tl.atomic_xchg(counts_ptr + token, 0, mask=known, sem="relaxed")
        mine = known & (count > 0)
        logit = tl.load(logits_ptr + token, mask=mine, other=0.0)
        logit = tl.where(logit > 0, tl.div_rn(logit, tl.zeros_like(logit) + factor), logit * factor)
        logit -= each * (count - 1).to(tl.float32)
        logit -= tl.where(count > 1, once, 0.0)
        tl.store(logits_ptr + token, tl.minimum(logit, LARGEST), mask=mine)


def penalise(logits: Tensor, token_table: Tensor, penalties: PenaltyRows) -> None:
    """Change the logits of seen tokens, in place; the arguments are checked, and P is at least 1."""
    count, vocab_size = penalties.rows.shape[0], logits.shape[1]
    counts = torch.empty((count, vocab_size), dtype=torch.int32, device=logits.device)
    strides = (logits.stride(0), token_table.stride(0))
    arrays, options = (logits, token_table, counts), {"num_warps": 8, "enable_fp_fusion": False}
    launch(_penalise_kernel, (count,))(arrays, *penalties, strides, vocab_size, **options)
