"""`ForwardBatch`: where each token of one step is, as tensors. Built by the worker, read by models and attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch


class ChunkLengths(NamedTuple):
    """What the host knows of a step's prefill chunks: tokens of each before the step, and in it. [chunks] int64."""

    contexts: np.ndarray
    tokens: np.ndarray


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step's tokens, packed sequence after sequence: decodes (one token each) first, then prefill chunks.

    S sequences, T tokens, N rows of logits wanted. Tensors are on the model's device. Layers whose KV is in blocks of
    their own are a group; a layer's `LayerCache` says of which group it is.

    input_ids: [T] int64. positions: [T] int64, a token's place in its sequence.
    slot_mappings: by group, [T] int64, where a token's KV goes: block id * block_size + offset; -1 writes nothing
    (padding).
    block_tables: by group, [S, max blocks] int32. What lies before the window of a group's layers is not read.
    seq_lens: [S] int32, context after this step (tokens with KV in the cache).
    query_start_loc: [S + 1] int32, sequence s owns tokens query_start_loc[s] to query_start_loc[s + 1].
    logit_rows: [N] int64, the tokens whose hidden states are wanted, in the plan's order; None stands for all tokens.
    num_decodes: leading sequences with exactly one token, attended by the decode kernel.
    max_query_len: of the prefill chunks, a host integer.
    prefill_row: the first row that chunks may have; None stands for num_decodes. Captured steps have room for more
    decodes than there are: rows below num_decodes whose sequence has length 0 then belong to chunks, if at all.
    chunks: how long the prefill chunks are, for layers that compute long ones in another way; None where the host does
    not know, as in a captured step.
    adapter_slots: [T] int32, where the weights of a token's adapter are, -1 without one; None if no token has one.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mappings: tuple[torch.Tensor, ...]
    block_tables: tuple[torch.Tensor, ...]
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    logit_rows: torch.Tensor | None
    num_decodes: int
    max_query_len: int
    prefill_row: int | None = None
    chunks: ChunkLengths | None = None
    adapter_slots: torch.Tensor | None = None
