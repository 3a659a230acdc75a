"""Sampling: a batch of logits to one token a row. Runs on any device without waiting for it.

The order of the operations is vLLM's:

    logit_bias -> min_tokens bans -> penalties -> greedy rows: argmax
                                               -> other rows: / temperature -> min_p -> top_k -> top_p -> draw

Each row's token depends on its logits, parameters, seed and position alone, not on the rest of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rayllm.sample import logit_bias, logprobs, penalties
from rayllm.sample.logprobs import LogprobTensors
from rayllm.sample.sampling_batch import CutRows, DrawRows, PenaltyRows, SamplingBatch
from rayllm.sample.top_k_top_p import cutoff
from rayllm.types import TokenLogprobs
from rayllm_kernels import ops

_LOWEST = torch.finfo(torch.float32).min


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """token_ids: [N] int64. logprobs: for the M rows that asked, in the batch's order; None if M is 0."""

    token_ids: torch.Tensor
    logprobs: LogprobTensors | None

    def to_host(self) -> SamplerOutput:
        """The same on the CPU. From CUDA the copies only start here: wait for an event recorded after them."""
        host_logprobs = self.logprobs.to_host() if self.logprobs else None
        return SamplerOutput(self.token_ids.to("cpu", non_blocking=True), host_logprobs)


def sample(logits: torch.Tensor, batch: SamplingBatch, token_table: torch.Tensor) -> SamplerOutput:
    """Choose a token for each row.

    logits: [N, V] float, raw, left as they are; -inf marks tokens that do not exist, +inf and NaN are not allowed.
    N is batch.num_rows. token_table: [max_num_seqs, max_model_len] integers, each table row's tokens so far; read
    only for penalised rows.
    """
    if logits.shape[0] != batch.num_rows:
        raise ValueError(f"{logits.shape[0]} rows of logits for a batch of {batch.num_rows}")
    raw = logits if batch.simple else logits.float()
    scores = _changed_logits(raw, batch, token_table) if batch.changes_logits else raw
    token_ids = scores.argmax(dim=1) if batch.draw is None else _draw(scores, batch.draw, batch.cut)
    reported = None
    if batch.logprobs is not None:
        rows = batch.logprobs.rows
        reported = logprobs.gather(_take(raw, rows), _take(token_ids, rows), batch.logprobs.max_num_top)
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
    """Logits after everything that applies to greedy rows too, in a new tensor. raw: [N, V] float32."""
    scores = raw.clone()
    if batch.bias is not None:
        logit_bias.add_bias(scores, batch.bias.rows, batch.bias.token_ids, batch.bias.values)
    if batch.bans is not None:
        logit_bias.ban(scores, batch.bans.rows, batch.bans.token_ids)
    if batch.penalties is not None:
        _penalise(scores, batch.penalties, token_table)
    return scores


def _penalise(scores: torch.Tensor, params: PenaltyRows, token_table: torch.Tensor) -> None:
    """Apply the penalties to their rows of scores [N, V], in place."""
    history = token_table[:, : params.max_num_tokens].index_select(0, params.table_rows)
    penalised = penalties.apply(
        _take(scores, params.rows),
        history,
        params.num_prompt_tokens,
        params.num_tokens,
        params.repetition,
        params.presence,
        params.frequency,
    )
    scores.index_copy_(0, params.rows, penalised)


def _draw(scores: torch.Tensor, draw: DrawRows, cut: CutRows | None) -> torch.Tensor:
    """Tokens drawn from the truncated softmax(scores / temperature), or the argmax of greedy rows. Returns [N] int64.

    scores: [N, V] float. Every batch draws by the same kernel from the same numbers, cut or not: rounding must not
    depend on what else is in it.
    """
    if cut is not None:
        scores = _truncated(scores, draw.temperature, cut)
    return ops.gumbel_argmax(scores, draw.seeds, draw.positions, draw.temperature, draw.noise_scale)


def _truncated(scores: torch.Tensor, temperature: torch.Tensor, cut: CutRows) -> torch.Tensor:
    """scores, with -inf for what top_k, top_p and min_p cut off: a new tensor.

    scores: [N, V] float32. temperature: [N] float32.
    """
    wanted = _take(scores, cut.rows)
    # Less the maximum before the division: a tiny temperature then sends logits to -inf, never to +inf. A row of
    # only -inf has no maximum to subtract.
    highest = wanted.amax(dim=1, keepdim=True).clamp_(min=_LOWEST)
    scaled = (wanted - highest).div_(_take(temperature, cut.rows)[:, None])
    cutoffs = cutoff(scaled, cut.top_k, cut.top_p, cut.log_min_p, cut.num_candidates, cut.any_top_p)
    kept = torch.where(scaled < cutoffs[:, None], float("-inf"), wanted)
    return kept if kept.shape[0] == scores.shape[0] else scores.index_copy(0, cut.rows, kept)


def _take(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """tensor[rows] for ascending row indices without repeats; if these are all its rows, the tensor itself."""
    return tensor if rows.shape[0] == tensor.shape[0] else tensor.index_select(0, rows)
