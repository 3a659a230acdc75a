"""`ChunkGraphs`: CUDA graphs of small steps that are not pure decodes: short prompts and chunks, also among decodes.

Launching a step's kernels one by one takes the host several milliseconds, more than the device needs for up to about
two thousand tokens of a small model. A graph has room for a number of tokens and of sequences; what a step leaves free
is padding: tokens with slot -1 that belong to no sequence, and sequences of length 0. Decodes are chunks of one token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rayllm.layers.attention import KVCache
from rayllm.layers.batch import ForwardBatch
from rayllm.models.base import CausalLM

TOKEN_SIZES = (32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
MAX_SEQUENCES = 64


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor


class ChunkGraphs:
    """Captured steps. `run` returns logits that the next `run` overwrites."""

    def __init__(
        self, model: CausalLM, caches: list[KVCache], *, max_tokens: int, max_num_seqs: int, max_model_len: int,
        block_size: int, device: torch.device,
    ):  # fmt: skip
        self._model, self._caches = model, caches
        self._sizes = [size for size in TOKEN_SIZES if size <= max_tokens]
        self._num_seqs = min(MAX_SEQUENCES, max_num_seqs)
        self._max_len = max_model_len
        tokens, seqs = max(self._sizes, default=0), self._num_seqs
        self._input_ids, self._positions = torch.zeros(2, tokens, dtype=torch.int64, device=device)
        self._slots = torch.full((tokens,), -1, dtype=torch.int64, device=device)
        self._logit_rows = torch.zeros(seqs, dtype=torch.int64, device=device)
        self._seq_lens = torch.zeros(seqs, dtype=torch.int32, device=device)
        self._query_starts = torch.zeros(seqs + 1, dtype=torch.int32, device=device)
        self._tables = torch.zeros(seqs, -(-max_model_len // block_size), dtype=torch.int32, device=device)
        self._graphs: dict[int, _Captured] = {}

    def capture(self) -> None:
        """Capture all sizes, largest first, into one memory pool. Must run on all ranks together."""
        pool = None
        for size in reversed(self._sizes):
            self._step(size)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                logits = self._step(size)
            pool = graph.pool()
            self._graphs[size] = _Captured(graph, logits)

    def fits(self, num_tokens: int, num_seqs: int) -> bool:
        """Whether a step of so many tokens and sequences can be replayed."""
        return bool(self._sizes) and num_tokens <= self._sizes[-1] and num_seqs <= self._num_seqs

    def run(self, batch: ForwardBatch, num_tokens: int, num_seqs: int) -> torch.Tensor:
        """Logits [rows, vocab_size] of batch.logit_rows, for a batch that `fits`."""
        captured = self._graphs[self._load(batch, num_tokens, num_seqs)]
        captured.graph.replay()
        return captured.logits[: batch.logit_rows.shape[0]]

    def _load(self, batch: ForwardBatch, num_tokens: int, num_seqs: int) -> int:
        """Copy a batch to where the graphs read it, over what a larger one left there; returns the graph's size."""
        size = next(size for size in self._sizes if size >= num_tokens)
        self._input_ids[:num_tokens].copy_(batch.input_ids)
        self._positions[:num_tokens].copy_(batch.positions)
        self._slots[:num_tokens].copy_(batch.slot_mapping)
        self._slots[num_tokens:size].fill_(-1)
        self._seq_lens[:num_seqs].copy_(batch.seq_lens)
        self._seq_lens[num_seqs:].fill_(0)
        self._query_starts[: num_seqs + 1].copy_(batch.query_start_loc)
        self._query_starts[num_seqs + 1 :].fill_(num_tokens)
        self._tables[:num_seqs, : batch.block_tables.shape[1]].copy_(batch.block_tables)
        rows = batch.logit_rows.shape[0]
        self._logit_rows[:rows].copy_(batch.logit_rows)
        self._logit_rows[rows:].fill_(0)  # rows of a larger graph would be out of bounds
        return size

    def _step(self, size: int) -> torch.Tensor:
        batch = ForwardBatch(
            input_ids=self._input_ids[:size],
            positions=self._positions[:size],
            slot_mapping=self._slots[:size],
            block_tables=self._tables,
            seq_lens=self._seq_lens,
            query_start_loc=self._query_starts,
            logit_rows=self._logit_rows,
            num_decodes=0,
            max_query_len=size,
            max_seq_len=self._max_len,
        )
        hidden = self._model(batch, self._caches)
        return self._model.compute_logits(hidden[batch.logit_rows])
