"""`DecodeGraphs`: CUDA graphs of whole decode forward passes, one a batch size, from input gather to logits.

A batch is padded to the next captured size. A padding row has sequence length 0 and slot -1, so it attends to nothing
and writes nothing; its logits are cut off. Graphs share one memory pool, being captured largest first.
"""

from __future__ import annotations

import torch

from rayllm.layers.attention import KVCache
from rayllm.layers.batch import ForwardBatch
from rayllm.models.base import CausalLM
from rayllm.worker.input_batch import PersistentBatch, StepInputs


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture: powers of two up to 16, then every 16, and max_num_seqs itself."""
    sizes = [size for size in (1, 2, 4, 8) if size < max_num_seqs]
    return [*sizes, *range(16, max_num_seqs, 16), max_num_seqs]


class DecodeGraphs:
    """Captured decode steps. `run` returns logits that the next `run` overwrites."""

    def __init__(self, model: CausalLM, caches: list[KVCache], state: PersistentBatch, max_num_seqs: int):
        self._model, self._caches = model, caches
        self._token_table = state.token_table
        self._sizes = graph_sizes(max_num_seqs)
        self._max_seq_len = state.token_table.shape[1]
        device = state.token_table.device
        self._rows = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._positions = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._slots = torch.full((max_num_seqs,), -1, dtype=torch.int64, device=device)
        self._seq_lens = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self._tables = torch.zeros(state.block_table.shape, dtype=torch.int32, device=device)
        self._query_starts = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=device)
        self._all_rows = torch.arange(max_num_seqs, dtype=torch.int64, device=device)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}

    def capture(self) -> None:
        """Capture all sizes. Must run on all ranks together."""
        pool = None
        for size in reversed(self._sizes):
            self._forward(size)  # compiles kernels and lets libraries allocate outside the capture
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                logits = self._forward(size)
            pool = graph.pool()
            self._graphs[size] = (graph, logits)

    def run(self, inputs: StepInputs) -> torch.Tensor:
        """Logits [n, vocab_size] of a plan of n decodes."""
        batch, count = inputs.batch, len(inputs.rows)
        size = next(size for size in self._sizes if size >= count)
        self._rows[:count].copy_(inputs.token_rows)
        self._positions[:count].copy_(batch.positions)
        self._slots[:count].copy_(batch.slot_mapping)
        self._seq_lens[:count].copy_(batch.seq_lens)
        self._tables[:count, : batch.block_tables.shape[1]].copy_(batch.block_tables)
        if count < size:
            self._slots[count:size].fill_(-1)
            self._seq_lens[count:size].fill_(0)
        graph, logits = self._graphs[size]
        graph.replay()
        return logits[:count]

    def _forward(self, size: int) -> torch.Tensor:
        rows, positions = self._rows[:size], self._positions[:size]
        batch = ForwardBatch(
            input_ids=self._token_table[rows, positions].to(torch.int64),
            positions=positions,
            slot_mapping=self._slots[:size],
            block_tables=self._tables[:size],
            seq_lens=self._seq_lens[:size],
            query_start_loc=self._query_starts[: size + 1],
            logit_rows=self._all_rows[:size],
            num_decodes=size,
            max_query_len=0,
            max_seq_len=self._max_seq_len,
        )
        return self._model.compute_logits(self._model(batch, self._caches))
