"""Argument checks of the sampling operations beyond a plain draw, in the manner of `checks`."""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import FLOAT_DTYPES, FLOAT_RULE, check_gumbel_argmax, check_last_dim, check_vector, fail


def check_truncate_draws(
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
    check_gumbel_argmax(logits, seeds, positions, temperature, temperature)
    count, device = rows.numel(), logits.device
    check_vector(token_ids, "token_ids", logits.shape[0], torch.int64, device)
    check_vector(rows, "rows", count, torch.int64, device)
    check_vector(top_k, "top_k", count, torch.int64, device)
    check_vector(top_p, "top_p", count, torch.float32, device)
    check_vector(log_min_p, "log_min_p", count, torch.float32, device)


def check_penalise(
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
    if logits.dim() != 2:
        fail("logits", "must be [rows, vocab_size]", logits.shape)
    if logits.dtype != torch.float32:
        fail("logits", "must be torch.float32", logits.dtype)
    check_last_dim(logits, "logits")
    if token_table.dim() != 2 or token_table.dtype != torch.int32:
        fail("token_table", "must be a 2-dimensional int32 tensor", (token_table.dtype, *token_table.shape))
    check_last_dim(token_table, "token_table")
    count, device = rows.numel(), logits.device
    for name, tensor in (
        ("rows", rows),
        ("table_rows", table_rows),
        ("num_prompt_tokens", num_prompt_tokens),
        ("num_tokens", num_tokens),
    ):
        check_vector(tensor, name, count, torch.int64, device)
    for name, tensor in (("repetition", repetition), ("presence", presence), ("frequency", frequency)):
        check_vector(tensor, name, count, torch.float32, device)


def check_gather_logprobs(logits: Tensor, rows: Tensor, token_ids: Tensor, num_top: int) -> None:
    if logits.dim() != 2:
        fail("logits", "must be [rows, vocab_size]", logits.shape)
    if logits.dtype not in FLOAT_DTYPES:
        fail("logits", FLOAT_RULE, logits.dtype)
    check_last_dim(logits, "logits")
    check_vector(rows, "rows", rows.numel(), torch.int64, logits.device)
    check_vector(token_ids, "token_ids", rows.numel(), torch.int64, logits.device)
    if not 0 <= num_top <= logits.shape[1]:
        fail("num_top", f"must be 0 to {logits.shape[1]}", num_top)
