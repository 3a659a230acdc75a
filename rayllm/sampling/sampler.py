"""Sampling: a batch of logits to one token a row. Runs on any device without waiting for it.

The order of the operations is vLLM's:

    logit_bias -> min_tokens bans -> penalties -> greedy rows: argmax
                                               -> other rows: / temperature -> min_p -> top_k -> top_p -> draw

Each row's token depends on its logits, parameters, seed and position alone, not on the rest of the batch. On CUDA a
draw is two launches; truncation, penalties and log-probabilities are one each. Logits are copied, to float32, only
where biases, bans or penalties change them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from rayllm.api.types import TokenLogprobs
from rayllm.sampling import logprobs
from rayllm.sampling.logprobs import LogprobTensors
from rayllm.sampling.sampling_batch import CutRows, DrawRows, SamplingBatch
from rayllm_kernels import ops


class SamplerOutput(NamedTuple):
    """What N rows drew."""

    token_ids: torch.Tensor  # [N] int64
    logprobs: LogprobTensors | None  # of the M rows that asked, in the batch's order; None if M is 0

    def to_host(self) -> SamplerOutput:
        """The same on the CPU. From CUDA the copies only start here: wait for an event recorded after them."""
        host_logprobs = self.logprobs.to_host() if self.logprobs else None
        return SamplerOutput(self.token_ids.to("cpu", non_blocking=True), host_logprobs)


def sample(logits: torch.Tensor, batch: SamplingBatch, token_table: torch.Tensor) -> SamplerOutput:
    """Choose a token for each row.

    logits: [N, V] float, raw, left as they are; -inf marks tokens that do not exist, +inf and NaN are not allowed.
    N is batch.num_rows. token_table: [max_num_seqs, max_model_len] int32, each table row's tokens so far; read
    only for penalised rows.
    """
    if logits.shape[0] != batch.num_rows:
        raise ValueError(f"{logits.shape[0]} rows of logits for a batch of {batch.num_rows}")
    scores = _changed_logits(logits, batch, token_table) if batch.changes_logits else logits
    token_ids = scores.argmax(dim=1) if batch.draw is None else _draw(scores, batch.draw, batch.cut)
    reported = None
    if batch.logprobs is not None:
        rows = batch.logprobs.rows
        reported = logprobs.gather(logits, rows, token_ids[rows], max(batch.logprobs.num_top))
    return SamplerOutput(token_ids, reported)


def logprob_entries(output: SamplerOutput, batch: SamplingBatch) -> list[TokenLogprobs | None] | None:
    """Log-probabilities as structs: one entry a row of the batch, None where not asked for; None if nobody asked.

    output: on the host (`SamplerOutput.to_host`), its copies done. batch: the one it was sampled with.
    """
    if batch.logprobs is None or output.logprobs is None:
        return None
    entries: list[TokenLogprobs | None] = [None] * batch.num_rows
    asked = logprobs.to_entries(output.logprobs, batch.logprobs.num_top)
    for row, entry in zip(batch.logprobs.host_rows, asked, strict=True):
        entries[row] = entry
    return entries


def _changed_logits(raw: torch.Tensor, batch: SamplingBatch, token_table: torch.Tensor) -> torch.Tensor:
    """Logits after everything that applies to greedy rows too, in a new float32 tensor. raw: [N, V]."""
    scores = raw.to(torch.float32, copy=True)
    if batch.bias is not None:
        batch.bias.apply(scores)
    if batch.bans is not None:
        batch.bans.apply(scores)
    if batch.penalties is not None:
        ops.penalise(scores, token_table, batch.penalties)
    return scores


def _draw(scores: torch.Tensor, draw: DrawRows, cut: CutRows | None) -> torch.Tensor:
    """Tokens drawn from the truncated softmax(scores / temperature), or the argmax of greedy rows. Returns [N] int64.

    scores: [N, V] float. Every row is drawn whole first. Noise does not depend on what top_k, top_p and min_p keep, so
    a token that they keep stands; elsewhere the same noise decides among what they keep.
    """
    token_ids = ops.gumbel_argmax(scores, draw)
    if cut is not None:
        ops.truncate_draws(token_ids, scores, draw, cut)
    return token_ids
