"""Repetition, presence and frequency penalties: logits changed by the tokens that a sequence already has.

Repetition (Keskar et al. 2019, "CTRL", with the sign rule of transformers): a token seen in prompt or output has its
logit divided by the penalty if positive, multiplied if negative. Presence and frequency (OpenAI): over output tokens
only, logit -= frequency * count and logit -= presence if count > 0. Repetition comes first.
"""

from __future__ import annotations

import torch


def apply(
    logits: torch.Tensor,
    history: torch.Tensor,
    num_prompt_tokens: torch.Tensor,
    num_tokens: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> torch.Tensor:
    """Penalised logits, [P, V] float32, a new tensor.

    logits: [P, V] float32. history: [P, L] integer token ids, prompt then output; entries from num_tokens on are
    ignored, as are ids >= V. num_prompt_tokens, num_tokens: [P] integers. The penalties: [P] float32; 1, 0 and 0
    change nothing. What overflows float32 becomes its largest number. Memory: about 20 bytes a logit beside the input.
    """
    num_rows, vocab_size = logits.shape
    place = torch.arange(history.shape[1], device=logits.device)
    known = (place < num_tokens[:, None]) & (history < vocab_size)
    output = known & (place >= num_prompt_tokens[:, None])
    # Whatever does not count is counted in one column too many, which is cut off: shapes never depend on data.
    ids = torch.where(known, history, vocab_size).long()
    output_ids = torch.where(output, ids, vocab_size)
    seen = torch.zeros(num_rows, vocab_size + 1, dtype=torch.bool, device=logits.device)
    seen.scatter_(1, ids, True)
    counts = torch.zeros(num_rows, vocab_size + 1, dtype=torch.int32, device=logits.device)
    counts.scatter_add_(1, output_ids, torch.ones_like(output_ids, dtype=torch.int32))
    seen, counts = seen[:, :vocab_size], counts[:, :vocab_size]

    factor = torch.where(seen, repetition[:, None], 1.0)
    result = torch.where(logits > 0, logits / factor, logits * factor)
    result -= frequency[:, None] * counts
    result -= presence[:, None] * (counts > 0)
    return result.clamp_(max=torch.finfo(torch.float32).max)
