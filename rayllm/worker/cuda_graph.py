"""`DecodeGraphs`: CUDA graphs of whole decode steps, one a batch size: gather inputs, forward pass, draw, write back.

A step costs the host one small copy (rows, positions, how to draw) and one replay; tokens and block tables are on
the device already. A batch is padded to the next captured size. A padding row has position -1, so it attends to
nothing and writes no KV; its token goes to the token table's spare row.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from rayllm.api.types import StepPlan
from rayllm.layers.attention import KVCache
from rayllm.layers.batch import ForwardBatch
from rayllm.models.base import CausalLM
from rayllm.parallel.tp_group import TPGroup
from rayllm.sampling.sampling_table import DrawColumns
from rayllm.worker.inputs import PersistentBatch, to_device
from rayllm.worker.step_memory import StepMemory
from rayllm_kernels import ops

WORDS = 4  # int64 words a sequence in a step's packed input: row, position, seed, (temperature, noise scale)


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture: powers of two up to 16, then every 16, and max_num_seqs itself."""
    sizes = [size for size in (1, 2, 4, 8) if size < max_num_seqs]
    return [*sizes, *range(16, max_num_seqs, 16), max_num_seqs]


def draw(logits: torch.Tensor, rows: ops.DrawRows, first_token: int, tp: TPGroup) -> torch.Tensor:
    """`ops.gumbel_argmax` over the ranks' logits [N, local tokens] -> token ids [N] int64, the same on all ranks.

    Only the ranks' best scores travel, 8 bytes a row, not the logits.
    """
    if tp.size == 1:
        return ops.gumbel_argmax(logits, rows)
    keys = ops.gumbel_keys(logits, rows, first_token=first_token)
    return ops.tokens_of_keys(tp.gather_small(keys).amax(0))


class DecodeGraphs:
    """Captured decode steps. `run` returns tensors that the next `run` overwrites.

    Mirrors block tables on the device, for which `apply` must see every plan. split_decodes: attend with the decode
    kernel, not as chunks of one token. logits_room: for logits, as `CausalLM.local_logits` takes it.
    """

    def __init__(
        self,
        model: CausalLM,
        caches: list[KVCache],
        state: PersistentBatch,
        max_num_seqs: int,
        split_decodes: bool = True,
        logits_room: torch.Tensor | None = None,
    ):
        self._logits_room = logits_room
        self._model, self._caches, self._split_decodes = model, caches, split_decodes
        self._token_table, self._block_size = state.token_table, state.block_size
        self._spare_row = max_num_seqs
        self._sizes = graph_sizes(max_num_seqs)
        self._size_for = [next(s for s in self._sizes if s >= n) for n in range(1, max_num_seqs + 1)]
        self._device = device = state.token_table.device
        self._max_blocks = state.block_table.shape[1]
        self._block_table = torch.zeros(max_num_seqs + 1, self._max_blocks, dtype=torch.int32, device=device)
        self._packed = torch.zeros(WORDS * max_num_seqs, dtype=torch.int64, device=device)
        self._input_ids = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._slots = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._seq_lens = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self._tables = torch.zeros(max_num_seqs, self._max_blocks, dtype=torch.int32, device=device)
        self._query_starts = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=device)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]] = {}

    def run_all(self, caches: list[KVCache]) -> None:
        """Compute a step of padding of each size, by the layers of `caches`. Must run on all ranks together."""
        for size in reversed(self._sizes):
            self._load_padding(size)
            self._step(size, caches)

    def capture(self, memory: StepMemory) -> None:
        """Capture all sizes. Must run on all ranks together."""
        for size in reversed(self._sizes):
            self._load_padding(size)
            graph, (logits, token_ids) = memory.capture(partial(self._step, size, self._caches))
            self._graphs[size] = (graph, logits, token_ids)

    def _load_padding(self, size: int) -> None:
        nobody = np.zeros(0, np.int64)
        self._packed[: WORDS * size].copy_(self._pack(size, nobody, nobody, DrawColumns.empty()))

    def apply(self, plan: StepPlan) -> None:
        """Bring the device's block tables up to date with a plan."""
        updates = [(data.row, data.first_block, data.block_table) for data in plan.new] + plan.block_updates
        if not updates:
            return
        starts = np.array([row * self._max_blocks + first for row, first, _ids in updates], np.int64)
        counts = np.array([len(ids) for _row, _first, ids in updates], np.int64)
        ends = np.cumsum(counts)
        places = np.arange(int(ends[-1])) + np.repeat(starts - ends + counts, counts)
        blocks = np.fromiter((block for _row, _first, ids in updates for block in ids), np.int64, int(ends[-1]))
        where, values = to_device([places, blocks], np.int64, self._device)
        self._block_table.view(-1).index_copy_(0, where, values.to(torch.int32))

    def run(self, rows: np.ndarray, positions: np.ndarray, draw: DrawColumns) -> tuple[torch.Tensor, torch.Tensor]:
        """Decode n sequences: (the rank's logits [n, local tokens], tokens drawn by temperature alone [n] int64).

        rows, positions: [n] int64, batch rows and the positions of their last tokens. The drawn tokens are in the token
        table already; a caller that draws otherwise from the logits overwrites them.
        """
        count = len(rows)
        graph, logits, token_ids = self._graphs[self._load(rows, positions, draw)]
        graph.replay()
        return logits[:count], token_ids[:count]

    def _load(self, rows: np.ndarray, positions: np.ndarray, draw: DrawColumns) -> int:
        """Copy a step's input to where the graphs read it; returns the graph's size."""
        size = self._size_for[len(rows) - 1]
        packed = self._pack(size, rows, positions, draw)
        self._packed[: WORDS * size].copy_(packed, non_blocking=True)
        return size

    def _pack(self, size: int, rows: np.ndarray, positions: np.ndarray, draw: DrawColumns) -> torch.Tensor:
        """One pinned buffer for a graph of `size`, its rows past len(rows) padding."""
        count = len(rows)
        packed = torch.empty(WORDS * size, dtype=torch.int64, pin_memory=self._device.type == "cuda")
        words = packed.numpy().reshape(WORDS, size)
        words[0, :count], words[0, count:] = rows, self._spare_row
        words[1, :count], words[1, count:] = positions, -1
        words[2, :count], words[2, count:] = draw.seeds, 0
        floats = words[3].view(np.float32)
        floats[:count], floats[count:size] = draw.temperature, 1.0
        floats[size : size + count], floats[size + count :] = draw.noise_scale, 0.0
        return packed

    def _step(self, size: int, caches: list[KVCache]) -> tuple[torch.Tensor, torch.Tensor]:
        rows, positions, seeds, floats = self._packed[: WORDS * size].view(WORDS, size).unbind(0)
        temperature, noise_scale = floats.view(torch.float32).view(2, size).unbind(0)
        batch = ForwardBatch(
            input_ids=self._input_ids[:size],
            positions=positions.clamp_min(0),
            slot_mapping=self._slots[:size],
            block_tables=self._tables[:size],
            seq_lens=self._seq_lens[:size],
            query_start_loc=self._query_starts[: size + 1],
            logit_rows=None,
            num_decodes=size if self._split_decodes else 0,
            max_query_len=0 if self._split_decodes else 1,
        )
        inputs = ops.DecodeInputs(batch.input_ids, batch.slot_mapping, batch.seq_lens, batch.block_tables)
        ops.decode_inputs(rows, positions, self._token_table, self._block_table, self._block_size, inputs)
        model = self._model
        logits = model.local_logits(model(batch, caches), self._logits_room)
        targets = positions + 1  # a padding row's is 0, in the spare row
        drawn = ops.DrawRows(seeds, targets, temperature, noise_scale)
        token_ids = draw(logits, drawn, model.lm_head.first_token, model.tp)
        self._token_table.index_put_((rows, targets), token_ids.to(torch.int32))
        return logits, token_ids
