"""`ChunkGraphs`: CUDA graphs of steps that are not pure decodes: prompts and chunks of them, alone or among decodes.

Launching a step's kernels one by one takes the host several milliseconds, more than the device needs for thousands of
tokens of a small model. A graph has room for a number of tokens, of decodes and of chunks; what a step leaves free is
padding: tokens with slot -1 that belong to no sequence, and sequences of length 0.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from rayllm.api.types import StepCost
from rayllm.layers.attention import KVCache
from rayllm.layers.batch import ForwardBatch
from rayllm.models.base import CausalLM
from rayllm.worker.step_memory import StepMemory

CHUNK_SIZES = (32, 64, 128, 192, 256, 320, 384, 512, 640, 768, 896, 1024, 1280, 1536, 2048)
MIXED_SIZES = (*CHUNK_SIZES[1:], 3072, 4096, 6144, 8192)
MAX_CHUNKS = 64  # of a step without decodes, where more would only be padding to walk over
# Above 2,048 tokens, a step is captured if it computes for less than launching it takes: about 20 ms.
CAPTURED_FLOPS = 1.5e13
PROBE_CONTEXT = 16384  # tokens of the sequence that a step's attention is timed with


def _rows(batch: ForwardBatch) -> torch.Tensor:
    assert batch.logit_rows is not None  # steps of which all hidden states are wanted are not captured
    return batch.logit_rows


def step_graphs(
    model: CausalLM, caches: list[KVCache], *, max_tokens: int, max_num_seqs: int, split_decodes: bool, **shape: Any
) -> list[ChunkGraphs]:
    """Graphs for steps of up to max_tokens tokens: without decodes, and with up to max_num_seqs of them.

    split_decodes: decodes have attention of their own, not that of chunks. The rest: as for `ChunkGraphs`.
    """
    weights = sum(parameter.numel() for parameter in model.parameters())
    most = min(max_tokens, max(CHUNK_SIZES[-1], int(CAPTURED_FLOPS / (2 * weights))))
    alone = [size for size in CHUNK_SIZES if size <= most]
    mixed = [size for size in MIXED_SIZES if size <= most]
    chunks = min(MAX_CHUNKS, max_num_seqs)
    return [
        ChunkGraphs(model, caches, alone, max_decodes=0, max_chunks=chunks, max_sampled=chunks, **shape),
        ChunkGraphs(
            model,
            caches,
            mixed,
            max_decodes=max_num_seqs if split_decodes else 0,
            max_chunks=max_num_seqs,
            max_sampled=max_num_seqs,
            **shape,
        ),
    ]


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor


class ChunkGraphs:
    """Captured steps of given sizes, in tokens, ascending. `run` returns logits that the next `run` overwrites.

    sizes: those. logits_room: for logits, as `CausalLM.local_logits` takes it.

    max_decodes, max_chunks: room for sequences with one token that the decode kernel attends, and for others; without
    room for decodes these count as chunks. max_sampled: rows of logits.
    """

    def __init__(
        self,
        model: CausalLM,
        caches: list[KVCache],
        sizes: list[int],
        *,
        max_decodes: int,
        max_chunks: int,
        max_sampled: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        logits_room: torch.Tensor | None = None,
    ):
        self._logits_room = logits_room
        self._model, self._caches, self.sizes = model, caches, sizes
        self._max_decodes, self._max_chunks, self._max_sampled = max_decodes, max_chunks, max_sampled
        tokens, seqs = max(sizes, default=0), max_decodes + max_chunks
        self._input_ids, self._positions = torch.zeros(2, tokens, dtype=torch.int64, device=device)
        self._slots = torch.full((tokens,), -1, dtype=torch.int64, device=device)
        self._block_size = block_size
        self._logit_rows = torch.zeros(max_sampled, dtype=torch.int64, device=device)
        self._seq_lens = torch.zeros(seqs, dtype=torch.int32, device=device)
        self._query_starts = torch.zeros(seqs + 1, dtype=torch.int32, device=device)
        self._tables = torch.zeros(seqs, -(-max_model_len // block_size), dtype=torch.int32, device=device)
        self._graphs: dict[int, _Captured] = {}

    def run_all(self, caches: list[KVCache]) -> None:
        """Compute a step of padding of each size, by the layers of `caches`. Must run on all ranks together."""
        for size in reversed(self.sizes):
            self._step(size, caches)

    def capture(self, memory: StepMemory) -> None:
        """Capture all sizes, largest first. Must run on all ranks together."""
        for size in reversed(self.sizes):
            self._graphs[size] = _Captured(*memory.capture(partial(self._step, size, self._caches)))

    def cost(self, size: int) -> StepCost:
        """What a captured step takes. Must run on all ranks together, before anything else is run."""
        padding, row = self._seconds(size), self._room(size)
        width = self._tables.shape[1]
        context = min(PROBE_CONTEXT, width * self._block_size)
        self._tables[row] = torch.arange(width, device=self._tables.device) % self._caches[0].k.shape[0]
        self._seq_lens[row] = context
        self._query_starts[row + 1 :] = min(size, context)
        chunk = self._seconds(size)
        self._seq_lens[row] = 0
        self._query_starts[row + 1 :] = 0
        return StepCost(padding, chunk, context)

    def _seconds(self, size: int) -> float:
        taken = 0.0
        for _ in range(2):  # the second is measured
            torch.cuda.synchronize()
            started = time.perf_counter()
            self._graphs[size].graph.replay()
            torch.cuda.synchronize()
            taken = time.perf_counter() - started
        return taken

    def fits(self, batch: ForwardBatch) -> bool:
        """Whether a step can be replayed."""
        tokens, seqs = batch.input_ids.shape[0], batch.seq_lens.shape[0]
        if not self.sizes or tokens > self.sizes[-1] or len(_rows(batch)) > self._max_sampled:
            return False
        decodes = min(batch.num_decodes, self._max_decodes)
        return (batch.num_decodes == 0 or self._max_decodes > 0) and seqs - decodes <= self._max_chunks

    def run(self, batch: ForwardBatch) -> torch.Tensor:
        """The rank's logits [rows, local tokens] of batch.logit_rows, for a batch that `fits`."""
        captured = self._graphs[self._load(batch)]
        captured.graph.replay()
        return captured.logits[: len(_rows(batch))]

    def _room(self, size: int) -> int:
        """Decodes that a graph of `size` tokens has room for."""
        return min(self._max_decodes, size)

    def _load(self, batch: ForwardBatch) -> int:
        """Copy a batch to where the graphs read it, over what a larger one left there; returns the graph's size."""
        num_tokens, num_seqs = batch.input_ids.shape[0], batch.seq_lens.shape[0]
        size = next(size for size in self.sizes if size >= num_tokens)
        self._input_ids[:num_tokens].copy_(batch.input_ids)
        self._positions[:num_tokens].copy_(batch.positions)
        self._slots[:num_tokens].copy_(batch.slot_mapping)
        self._slots[num_tokens:size].fill_(-1)
        decodes, room = batch.num_decodes, self._room(size)
        chunks = slice(room, room + num_seqs - decodes)
        self._seq_lens[:decodes].copy_(batch.seq_lens[:decodes])
        self._seq_lens[decodes:room].fill_(0)
        self._seq_lens[chunks].copy_(batch.seq_lens[decodes:])
        self._seq_lens[chunks.stop :].fill_(0)
        self._query_starts[room : chunks.stop + 1].copy_(batch.query_start_loc[decodes:])
        self._query_starts[chunks.stop + 1 :].fill_(num_tokens)
        width = batch.block_tables.shape[1]
        self._tables[:decodes, :width].copy_(batch.block_tables[:decodes])
        self._tables[chunks, :width].copy_(batch.block_tables[decodes:])
        rows = _rows(batch)
        self._logit_rows[: len(rows)].copy_(rows)
        self._logit_rows[len(rows) :].fill_(0)  # rows of a larger graph would be out of bounds
        return size

    def _step(self, size: int, caches: list[KVCache]) -> torch.Tensor:
        room = self._room(size)
        seqs = room + self._max_chunks
        batch = ForwardBatch(
            input_ids=self._input_ids[:size],
            positions=self._positions[:size],
            slot_mapping=self._slots[:size],
            block_tables=self._tables[:seqs],
            seq_lens=self._seq_lens[:seqs],
            query_start_loc=self._query_starts[: seqs + 1],
            logit_rows=self._logit_rows,
            num_decodes=room,
            max_query_len=size,
            prefill_row=0,
        )
        return self._model.local_logits(self._model(batch, caches), self._logits_room)
