"""The torch references of what surrounds the model in a decode step: its inputs, and the choice of a token.

`reference_truncation` has the rest of the choice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import check_decode_inputs, check_gumbel_argmax
from .checks_sampling import check_gather_logprobs, check_penalise
from .reference_noise import gumbel_noise

NO_TOKEN = 0x7FFFFFFF


def gumbel_argmax(logits: Tensor, seeds: Tensor, positions: Tensor, temperature: Tensor, noise_scale: Tensor) -> Tensor:
    """argmax of logits * (1 / temperature) + noise_scale * noise, in fp32."""
    check_gumbel_argmax(logits, seeds, positions, temperature, noise_scale)
    scores = logits.float() * (1.0 / temperature)[:, None]
    noise = gumbel_noise(seeds, positions, logits.shape[1])
    return scores.add_(noise.mul_(noise_scale[:, None])).argmax(dim=1)


def gumbel_keys(
    logits: Tensor, seeds: Tensor, positions: Tensor, temperature: Tensor, noise_scale: Tensor, *, first_token: int
) -> Tensor:
    """(the best score in the order of integers) * 2^32 + NO_TOKEN - the lowest token that has it."""
    check_gumbel_argmax(logits, seeds, positions, temperature, noise_scale, first_token)
    scores = logits.float() * (1.0 / temperature)[:, None]
    scores += gumbel_noise(seeds, positions, logits.shape[1], first_token) * noise_scale[:, None]
    top = scores.amax(dim=1, keepdim=True)
    ids = torch.arange(first_token, first_token + logits.shape[1], device=logits.device)
    token = torch.where(scores == top, ids, NO_TOKEN).amin(dim=1)
    bits = top[:, 0].view(torch.int32)
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    return order * 2**32 + (NO_TOKEN - token)


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
    """By a matrix of counts, [P, V]. About 20 bytes a logit of the P rows beside the input."""
    check_penalise(
        logits, token_table, rows, table_rows, num_prompt_tokens, num_tokens, repetition, presence, frequency
    )
    if not rows.shape[0]:
        return
    vocab_size = logits.shape[1]
    history = token_table[table_rows, : int(num_tokens.max())].long()
    place = torch.arange(history.shape[1], device=logits.device)
    known = (place < num_tokens[:, None]) & (history >= 0) & (history < vocab_size)
    output = known & (place >= num_prompt_tokens[:, None])
    # Whatever does not count is counted in one column too many, which is cut off.
    ids, output_ids = torch.where(known, history, vocab_size), torch.where(output, history, vocab_size)
    seen = torch.zeros(rows.shape[0], vocab_size + 1, dtype=torch.bool, device=logits.device)
    seen = seen.scatter_(1, ids, True)[:, :vocab_size]
    counts = torch.zeros(rows.shape[0], vocab_size + 1, dtype=torch.int32, device=logits.device)
    counts = counts.scatter_add_(1, output_ids, torch.ones_like(output_ids, dtype=torch.int32))[:, :vocab_size]
    own = logits.index_select(0, rows)
    factor = torch.where(seen, repetition[:, None], 1.0)
    result = torch.where(own > 0, own / factor, own * factor)
    result -= frequency[:, None] * counts
    result -= presence[:, None] * (counts > 0)
    logits.index_copy_(0, rows, result.clamp_(max=torch.finfo(torch.float32).max))


def gather_logprobs(
    logits: Tensor, rows: Tensor, token_ids: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """log_softmax of the rows in fp32. Memory: 8 bytes a logit of these rows, 20 if num_top > 0."""
    check_gather_logprobs(logits, rows, token_ids, num_top)
    own = logits.index_select(0, rows).float()
    highest = own.amax(dim=1, keepdim=True)
    log_total = (own - highest).exp_().sum(dim=1, keepdim=True).log_()
    chosen = own.gather(1, token_ids[:, None])
    ranks = (own > chosen).sum(dim=1) + 1
    if num_top > 0:
        top_ids = _ordered_keys(own).topk(num_top, dim=1).indices
    else:
        top_ids = token_ids.new_empty(token_ids.shape[0], 0)
    top_logprobs = own.gather(1, top_ids) - highest - log_total
    return (chosen - highest - log_total)[:, 0], ranks, top_ids, top_logprobs


def _ordered_keys(logits: Tensor) -> Tensor:
    """int64 keys in the order of (logit, then lower id first): topk of them has no ties, so it is the same anywhere.

    The bits of a float32, with all but the sign flipped if it is negative, are an integer in the float's order.
    """
    bits = (logits + 0.0).view(torch.int32)  # + 0.0 makes -0.0 and 0.0 equal
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ids = torch.arange(logits.shape[1], device=logits.device)
    return (ordered.long() << 32) - ids


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
    """Gather by plain indexing; padding rows are set apart first."""
    check_decode_inputs(rows, positions, token_table, block_table, input_ids, slots, seq_lens, block_tables)
    real = positions >= 0
    position = positions.clamp_min(0)
    input_ids.copy_(torch.where(real, token_table[rows, position].to(torch.int64), 0))
    blocks = block_table[rows, position // block_size].to(torch.int64)
    slots.copy_(torch.where(real, blocks * block_size + position % block_size, -1))
    seq_lens.copy_(torch.where(real, position + 1, 0).to(torch.int32))
    used = torch.arange(block_table.shape[1], device=rows.device)[None, :] * block_size <= positions[:, None]
    block_tables.copy_(torch.where(used, block_table[rows], block_tables))
