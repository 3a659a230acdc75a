"""CUDA graphs of steps: `DecodeGraphs` if all sequences decode, `ChunkGraphs` if there are prompts or chunks of them.

Launching a step's kernels one by one takes the host several milliseconds, more than the device needs for thousands of
tokens of a small model. A step is padded to the next captured size. Without `capture`, as on a CPU, the same steps are
computed kernel by kernel.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from rayllm.api.types import StepCost
from rayllm.layers.batch import ForwardBatch
from rayllm.layers.latent_plan import are_expanded, spared
from rayllm.models.base import Cache, CausalLM
from rayllm.parallel.tp_group import TPGroup
from rayllm.sampling.sampling_table import DrawColumns
from rayllm.worker.inputs import PersistentBatch, StepLayout
from rayllm.worker.memory import StepMemory
from rayllm_kernels import ops

WORDS = 4  # int64 words a sequence in a decode step's packed input: row, position, seed, (temperature, noise scale)
CHUNK_SIZES = (32, 64, 128, 192, 256, 320, 384, 512, 640, 768, 896, 1024, 1280, 1536, 2048)
MIXED_SIZES = (*CHUNK_SIZES[1:], 3072, 4096, 6144, 8192)
MAX_CHUNKS = 64  # of a step without decodes, where more would only be padding to walk over
# Sequences of a step among decodes, which computes logits for as many whether they are there or not; steps with more
# have graphs of their own. Those, and decode steps of more, are captured when they come: few servers need them, and
# with 1,024 sequences they would be a quarter of all graphs.
MIXED_SEQS = 256
WIDE_SIZES = (512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
# Above 2,048 tokens, a step is captured if it computes for less than launching it takes: about 20 ms. A captured one is
# not replayed if computing it kernel by kernel spares as much.
CAPTURED_FLOPS = 1.5e13
PROBE_CONTEXT = 16384  # tokens of the sequence that a step's attention is timed with


@dataclass(frozen=True, slots=True)
class RunContext:
    """What the steps of a rank run on."""

    model: CausalLM
    # One a layer.
    caches: list[Cache]
    batch: PersistentBatch
    # Decodes are attended by the decode kernel. Without it they are chunks of one token, whose results do not depend on
    # how a sequence was cut into steps.
    split_decodes: bool

    @property
    def device(self) -> torch.device:
        return self.batch.token_table.device

    @property
    def max_num_seqs(self) -> int:
        return len(self.batch.num_tokens)

    @property
    def spare(self) -> int:
        """The batch row of padding."""
        return self.max_num_seqs

    @property
    def max_blocks(self) -> int:
        """Of a sequence."""
        return self.batch.block_tables.shape[2]

    @property
    def num_groups(self) -> int:
        """Groups of layers, each of which has block tables."""
        return self.batch.block_tables.shape[0]

    def spared_flops(self, layout: StepLayout) -> int:
        """What a rank computes less of a step that is not captured, because captured ones do not know how long chunks
        are: latent attention expands keys and values for long ones.
        """
        spec, build = self.model.spec, self.model.build
        if spec.latent is None or build.deterministic:
            return 0
        multiplications = int(spared(spec.latent, layout.chunks)[are_expanded(spec.latent, layout.chunks)].sum())
        return 2 * multiplications * spec.num_heads // build.tp.size * spec.num_layers


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes of decode steps to capture, the last being max_num_seqs.

    Powers of two up to 16, then every 16, and above 256 four sizes from each power of two to the next: steps of 64 and
    128 rows, which is what matrix products are cut into anyway. 1,024 sequences need 28 graphs.
    """
    sizes = [1]
    while sizes[-1] < max_num_seqs:
        last = sizes[-1]
        sizes.append(last + (last if last < 16 else 16 if last < 256 else (1 << last.bit_length()) // 8))
    return [*sizes[:-1], max_num_seqs]


def table_bytes(max_num_seqs: int, max_model_len: int, block_size: int, num_groups: int) -> int:
    """Of the token table and of the block tables that eager and captured steps read, on the device."""
    block_tables = 4 * max_num_seqs + MAX_CHUNKS + (2 * MIXED_SEQS if max_num_seqs > MIXED_SEQS else 0)
    return 4 * (max_num_seqs + 1) * max_model_len + 4 * num_groups * block_tables * -(-max_model_len // block_size)


def graph_bytes(max_num_seqs: int, num_layers: int) -> int:
    """What captured graphs take of the driver's memory. Measured on H200: 33 to 40 KiB a layer and graph."""
    wide = len(WIDE_SIZES) if max_num_seqs > MIXED_SEQS else 0
    return 48 * 1024 * num_layers * (len(graph_sizes(max_num_seqs)) + len(CHUNK_SIZES) + len(MIXED_SIZES) + wide)


class _Captured(ABC):
    """A step of several sizes: replayed where it was captured, and otherwise computed kernel by kernel.

    sizes: ascending. logits_room: where all graphs put their logits, as `CausalLM.local_logits` takes it. adapted:
    tokens may have adapters.
    """

    def __init__(self, context: RunContext, sizes: Sequence[int], logits_room: torch.Tensor, adapted: bool):
        self._context, self.sizes, self._logits_room, self._adapted = context, sizes, logits_room, adapted
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, tuple[torch.Tensor, ...]]] = {}
        self._missed: Counter[int] = Counter()  # how often steps were computed kernel by kernel, by size
        self._used = 0  # the size of the last such step; 0 if it is captured

    def run_all(self, caches: list[Cache]) -> None:
        """Compute a step of padding of each size, by the layers of `caches`. Must run on all ranks together."""
        for size in reversed(self.sizes):
            self._load_padding(size)
            self._step(size, caches)

    def capture(self, sizes: Sequence[int], memory: StepMemory) -> None:
        """Capture these sizes, ascending; the largest goes first. Must run on all ranks together."""
        for size in reversed(sizes):
            self._load_padding(size)
            self._graphs[size] = memory.capture(partial(self._step, size, self._context.caches))

    def capture_used(self, memory: StepMemory) -> None:
        """Capture the size of the last step if that came for the second time. Must run on all ranks together.

        The first time there may be prompts to compute again, of many sizes that do not come again soon.
        """
        size, self._used = self._used, 0
        if self._missed[size] > 1:
            step = partial(self._step, size, self._context.caches)
            self._graphs[size] = memory.capture(step, "thread_local")
            del self._missed[size]

    def _replay(self, size: int) -> tuple[torch.Tensor, ...]:
        """What a step of this size returns, over what has been loaded."""
        if size not in self._graphs:
            self._used = size
            self._missed[size] += 1
            return self._step(size, self._context.caches)
        graph, output = self._graphs[size]
        graph.replay()
        return output

    def _adapter_slots(self, rows: torch.Tensor) -> torch.Tensor | None:
        """Of the tokens of these batch rows."""
        return self._context.batch.adapter_table[rows] if self._adapted else None

    @abstractmethod
    def _load_padding(self, size: int) -> None:
        """Fill the inputs of a step of this size with padding alone."""

    @abstractmethod
    def _step(self, size: int, caches: list[Cache]) -> tuple[torch.Tensor, ...]:
        """Compute what has been loaded. The logits come first."""


class DecodeGraphs(_Captured):
    """Whole decode steps, one graph a batch size: gather inputs, forward pass, draw, write back.

    A step costs the host one small copy (rows, positions, how to draw) and one replay; tokens and block tables are on
    the device already. A padding row has position -1, so it attends to nothing and writes no KV; its token goes to the
    token table's spare row. `run` returns tensors that the next `run` overwrites.
    """

    def __init__(self, context: RunContext, logits_room: torch.Tensor, *, adapted: bool = False):
        seqs, groups, device = context.max_num_seqs, context.num_groups, context.device
        super().__init__(context, graph_sizes(seqs), logits_room, adapted)
        self._size_for = [next(s for s in self.sizes if s >= n) for n in range(1, seqs + 1)]
        self._packed = torch.zeros(WORDS * seqs, dtype=torch.int64, device=device)
        self._input_ids = torch.zeros(seqs, dtype=torch.int64, device=device)
        self._slots = torch.zeros(groups, seqs, dtype=torch.int64, device=device)
        self._seq_lens = torch.zeros(seqs, dtype=torch.int32, device=device)
        self._tables = torch.zeros(groups, seqs, context.max_blocks, dtype=torch.int32, device=device)
        self._query_starts = torch.arange(seqs + 1, dtype=torch.int32, device=device)

    def run(self, rows: np.ndarray, positions: np.ndarray, draw: DrawColumns) -> tuple[torch.Tensor, torch.Tensor]:
        """Decode n sequences: (the rank's logits [n, local tokens], tokens drawn by temperature alone [n] int64).

        rows, positions: [n] int64, batch rows and the positions of their last tokens. The drawn tokens are in the token
        table already; a caller that draws otherwise from the logits overwrites them.
        """
        count = len(rows)
        size = self._size_for[count - 1]
        self._packed[: WORDS * size].copy_(self._pack(size, rows, positions, draw), non_blocking=True)
        logits, token_ids = self._replay(size)
        return logits[:count], token_ids[:count]

    def _load_padding(self, size: int) -> None:
        nobody = np.zeros(0, np.int64)
        self._packed[: WORDS * size].copy_(self._pack(size, nobody, nobody, DrawColumns(nobody, nobody, nobody)))

    def _pack(self, size: int, rows: np.ndarray, positions: np.ndarray, draw: DrawColumns) -> torch.Tensor:
        """One pinned buffer for a graph of `size`, its rows past len(rows) padding."""
        count = len(rows)
        packed = torch.empty(WORDS * size, dtype=torch.int64, pin_memory=self._context.device.type == "cuda")
        words = packed.numpy().reshape(WORDS, size)
        words[0, :count], words[0, count:] = rows, self._context.spare
        words[1, :count], words[1, count:] = positions, -1
        words[2, :count], words[2, count:] = draw.seeds, 0
        floats = words[3].view(np.float32)
        floats[:count], floats[count:size] = draw.temperature, 1.0
        floats[size : size + count], floats[size + count :] = draw.noise_scale, 0.0
        return packed

    def _step(self, size: int, caches: list[Cache]) -> tuple[torch.Tensor, torch.Tensor]:
        model, state, split = self._context.model, self._context.batch, self._context.split_decodes
        rows, positions, seeds, floats = self._packed[: WORDS * size].view(WORDS, size).unbind(0)
        temperature, noise_scale = floats.view(torch.float32).view(2, size).unbind(0)
        input_ids, seq_lens = self._input_ids[:size], self._seq_lens[:size]
        inputs = ops.DecodeInputs(input_ids, self._slots[:, :size], seq_lens, self._tables[:, :size])
        batch = ForwardBatch(
            input_ids=input_ids,
            positions=positions.clamp_min(0),
            slot_mappings=inputs.slots.unbind(),
            block_tables=inputs.block_tables.unbind(),
            seq_lens=seq_lens,
            query_start_loc=self._query_starts[: size + 1],
            logit_rows=None,
            num_decodes=size if split else 0,
            max_query_len=0 if split else 1,
            adapter_slots=self._adapter_slots(rows),
        )
        ops.decode_inputs(rows, positions, state.token_table, state.block_tables, state.block_size, inputs)
        logits = model.local_logits(model(batch, caches), self._logits_room)
        targets = positions + 1  # a padding row's is 0, in the spare row
        drawn = ops.DrawRows(seeds, targets, temperature, noise_scale)
        token_ids = draw(logits, drawn, model.lm_head.first_token, model.tp)
        state.token_table.index_put_((rows, targets), token_ids.to(torch.int32))
        return logits, token_ids


def draw(logits: torch.Tensor, rows: ops.DrawRows, first_token: int, tp: TPGroup) -> torch.Tensor:
    """`ops.gumbel_argmax` over the ranks' logits [N, local tokens] -> token ids [N] int64, the same on all ranks.

    Only the ranks' best scores travel, 8 bytes a row, not the logits.
    """
    if tp.size == 1:
        return ops.gumbel_argmax(logits, rows)
    keys = ops.gumbel_keys(logits, rows, first_token=first_token)
    return ops.tokens_of_keys(tp.gather_small(keys).amax(0))


class ChunkInputs(NamedTuple):
    """What the host sends of a step of size T, with room for S sequences and N rows of logits: views of one buffer.

    Padding is tokens with position -1 that belong to no sequence, and sequences of length 0.
    """

    # [T] int64, the batch row and position of each token.
    token_rows: torch.Tensor
    positions: torch.Tensor
    # [S] int64, the batch row of each sequence.
    seq_rows: torch.Tensor
    # [N] int64, tokens of the step.
    logit_rows: torch.Tensor
    # [S] int32, of each sequence's context after the step.
    seq_lens: torch.Tensor
    # [S + 1] int32, tokens of the step.
    query_starts: torch.Tensor


class ChunkGraphs(_Captured):
    """Captured steps up to the logits, with prompts and chunks of them, alone or among decodes.

    A graph has room for a number of tokens, of decodes and of chunks. As for decodes, a step costs the host one copy
    and one replay: what else it needs of its tokens and sequences is gathered on the device. `run` returns logits that
    the next `run` overwrites.

    sizes: in tokens, ascending. max_decodes, max_chunks: room for sequences with one token that the decode kernel
    attends, and for others; without room for decodes these count as chunks. As many rows of logits as chunks and, with
    decodes, as sequences.
    """

    def __init__(
        self,
        context: RunContext,
        sizes: list[int],
        *,
        max_decodes: int,
        max_chunks: int,
        logits_room: torch.Tensor,
        adapted: bool = False,
    ):
        super().__init__(context, sizes, logits_room, adapted)
        self._max_decodes, self._max_chunks = max_decodes, max_chunks
        tokens, seqs, device = max(sizes, default=0), max_decodes + max_chunks, context.device
        self._packed = torch.zeros(self._num_words(tokens), dtype=torch.int64, device=device)
        self._input_ids = torch.zeros(tokens, dtype=torch.int64, device=device)
        self._slots = torch.zeros(context.num_groups, tokens, dtype=torch.int64, device=device)
        self._tables = torch.zeros(context.num_groups, seqs, context.max_blocks, dtype=torch.int32, device=device)

    def cost(self, size: int) -> StepCost:
        """What a captured step takes. Must run on all ranks together, before anything else is run."""
        state, room = self._context.batch, self._room(size)
        self._load_padding(size)
        padding = self._seconds(size)
        width = self._context.max_blocks
        context = min(PROBE_CONTEXT, width * state.block_size)
        # A sequence of the spare row, whose blocks nobody reads otherwise.
        num_blocks = self._context.caches[0].num_blocks
        state.block_tables[:, -1] = torch.arange(width, device=self._context.device) % num_blocks
        inputs = self._inputs(self._packed, size)
        inputs.seq_lens[room] = context
        inputs.query_starts[room + 1 :] = min(size, context)
        chunk = self._seconds(size)
        state.block_tables[:, -1] = 0
        return StepCost(padding, chunk, context)

    def fits(self, layout: StepLayout) -> bool:
        """Whether a step can be replayed."""
        if not self.sizes or layout.num_tokens > self.sizes[-1] or layout.num_sampled > self._max_chunks:
            return False
        decodes = min(layout.num_decodes, self._max_decodes)
        if decodes != layout.num_decodes or len(layout.rows) - decodes > self._max_chunks:
            return False
        return self._context.spared_flops(layout) < CAPTURED_FLOPS

    def run(self, layout: StepLayout) -> torch.Tensor:
        """The rank's logits [num_sampled, local tokens] of a step that `fits`."""
        size = next(size for size in self.sizes if size >= layout.num_tokens)
        self._load(size, layout)
        (logits,) = self._replay(size)
        return logits[: layout.num_sampled]

    def _seconds(self, size: int) -> float:
        taken = 0.0
        for _ in range(2):  # the second is measured
            torch.cuda.synchronize()
            started = time.perf_counter()
            self._graphs[size][0].replay()
            torch.cuda.synchronize()
            taken = time.perf_counter() - started
        return taken

    def _room(self, size: int) -> int:
        """Decodes that a graph of `size` tokens has room for."""
        return min(self._max_decodes, size)

    def _num_words(self, size: int) -> int:
        """What the inputs of a graph take of a buffer of int64; its last numbers are half as wide."""
        return 2 * size + self._max_chunks + 2 * (self._room(size) + self._max_chunks) + 1

    def _inputs(self, packed: torch.Tensor, size: int) -> ChunkInputs:
        """The inputs of a graph in a buffer of int64, on the host or on the device."""
        seqs, rows = self._room(size) + self._max_chunks, self._max_chunks
        wide = packed[: 2 * size + seqs + rows].split([size, size, seqs, rows])
        narrow = packed[2 * size + seqs + rows :].view(torch.int32)[: 2 * seqs + 1].split([seqs, seqs + 1])
        return ChunkInputs(*wide, *narrow)

    def _load_padding(self, size: int) -> None:
        nobody = np.zeros(0, np.int64)
        self._load(size, StepLayout(nobody, nobody, nobody, 0, 0))

    def _load(self, size: int, layout: StepLayout) -> None:
        """Send a step to where the graph of `size` reads it."""
        num_tokens, decodes, room, spare = layout.num_tokens, layout.num_decodes, self._room(size), self._context.spare
        on_cuda = self._context.device.type == "cuda"
        packed = torch.empty(self._num_words(size), dtype=torch.int64, pin_memory=on_cuda)
        parts = self._inputs(packed, size)
        token_rows, positions, seq_rows, logit_rows, seq_lens, query_starts = (part.numpy() for part in parts)
        token_rows[:num_tokens], token_rows[num_tokens:] = np.repeat(layout.rows, layout.counts), spare
        positions[:num_tokens], positions[num_tokens:] = layout.positions, -1
        chunks = slice(room, room + len(layout.rows) - decodes)
        seq_rows[:], seq_lens[:] = spare, 0
        seq_rows[:decodes], seq_rows[chunks] = layout.rows[:decodes], layout.rows[decodes:]
        seq_lens[:decodes], seq_lens[chunks] = layout.seq_lens[:decodes], layout.seq_lens[decodes:]
        starts = layout.query_starts
        query_starts[:room], query_starts[chunks.stop + 1 :] = 0, num_tokens
        query_starts[room : chunks.stop + 1] = starts[decodes:]
        logit_rows[: layout.num_sampled] = starts[1 : layout.num_sampled + 1] - 1
        logit_rows[layout.num_sampled :] = 0
        self._packed[: len(packed)].copy_(packed, non_blocking=True)

    def _step(self, size: int, caches: list[Cache]) -> tuple[torch.Tensor]:
        model, state, room = self._context.model, self._context.batch, self._room(size)
        inputs = self._inputs(self._packed, size)
        input_ids, slots = self._input_ids[:size], self._slots[:, :size]
        tables = self._tables[:, : len(inputs.seq_rows)]
        where = (inputs.token_rows, inputs.positions, state.token_table, state.block_tables, state.block_size)
        ops.token_inputs(*where, input_ids, slots)
        torch.index_select(state.block_tables, 1, inputs.seq_rows, out=tables)
        batch = ForwardBatch(
            input_ids=input_ids,
            positions=inputs.positions.clamp_min(0),
            slot_mappings=slots.unbind(),
            block_tables=tables.unbind(),
            seq_lens=inputs.seq_lens,
            query_start_loc=inputs.query_starts,
            logit_rows=inputs.logit_rows,
            num_decodes=room,
            max_query_len=size,
            prefill_row=0,
            adapter_slots=self._adapter_slots(inputs.token_rows),
        )
        return (model.local_logits(model(batch, caches), self._logits_room),)


@dataclass(frozen=True, slots=True)
class StepGraphs:
    """The captured steps of a rank."""

    # None: decode-only steps are run as others are.
    decodes: DecodeGraphs | None = None
    # Tried in order.
    chunks: Sequence[ChunkGraphs] = ()
    # Of steps in which tokens have adapters; None if there are none.
    adapted: StepGraphs | None = None

    @torch.inference_mode()
    def capture_used(self, memory: StepMemory) -> None:
        """Between steps: as `_Captured.capture_used`."""
        for graphs in (self.decodes, *self.chunks):
            if graphs is not None:
                graphs.capture_used(memory)
        if self.adapted is not None:
            self.adapted.capture_used(memory)

    @torch.inference_mode()
    def costs(self) -> dict[int, StepCost]:
        """As `RankReady` has them; measured on all ranks together, before the first step."""
        return {size: self.chunks[1].cost(size) for size in self.chunks[1].sizes} if self.chunks else {}


@torch.inference_mode()
def make_graphs(context: RunContext, max_tokens: int) -> StepGraphs:
    """Decode-only steps of all sizes, and others of up to max_tokens tokens, of which none is captured yet."""
    head = context.model.lm_head
    # Logits are read before the next step runs, so all graphs put theirs here.
    room = torch.empty(context.max_num_seqs, head.num_tokens, dtype=head.weight.dtype, device=context.device)
    adapted = None
    if context.model.build.adapters is not None:
        chunks = step_graphs(context, max_tokens, room, adapted=True)
        adapted = StepGraphs(DecodeGraphs(context, room, adapted=True), chunks)
    return StepGraphs(DecodeGraphs(context, room), step_graphs(context, max_tokens, room), adapted)


@torch.inference_mode()
def capture_graphs(context: RunContext, max_tokens: int, memory: StepMemory) -> StepGraphs:
    """`make_graphs`, run all of them, and capture those of up to MIXED_SEQS sequences. On all ranks together."""
    made = make_graphs(context, max_tokens)
    torch.cuda.synchronize()  # its buffers are zeroed on another stream than steps run on
    for graphs in (made, made.adapted):
        if graphs is not None:
            _capture(graphs, context, memory)
    return made


def _capture(made: StepGraphs, context: RunContext, memory: StepMemory) -> None:
    decodes, (alone, mixed, *wide) = made.decodes, made.chunks
    assert decodes is not None
    all_graphs: list[_Captured] = [*wide, mixed, alone, decodes]  # the largest first
    caches = context.caches[: context.model.spec.num_distinct_layers]
    with memory.active():
        with ops.compile_only():
            for graphs in all_graphs:
                graphs.run_all(caches)
        for graphs in all_graphs[len(wide) :]:
            graphs.run_all(caches)
    torch.cuda.synchronize()
    mixed.capture(mixed.sizes, memory)
    alone.capture(alone.sizes, memory)
    decodes.capture([size for size in decodes.sizes if size <= MIXED_SEQS], memory)


def step_graphs(
    context: RunContext, max_tokens: int, logits_room: torch.Tensor, *, adapted: bool = False
) -> list[ChunkGraphs]:
    """Graphs for steps of up to max_tokens tokens: without decodes, with up to MIXED_SEQS and with more of them."""
    flops = 2 * context.model.active_parameters  # of a token
    most = min(max_tokens, max(CHUNK_SIZES[-1], int(CAPTURED_FLOPS / flops)))
    seqs = context.max_num_seqs

    def up_to(decodes: int, chunks: int, sizes: Sequence[int]) -> ChunkGraphs:
        sizes = [size for size in sizes if size <= most]
        decodes = decodes if context.split_decodes else 0
        return ChunkGraphs(
            context, sizes, max_decodes=decodes, max_chunks=chunks, logits_room=logits_room, adapted=adapted
        )

    few = min(seqs, MIXED_SEQS)
    graphs = [up_to(0, min(MAX_CHUNKS, seqs), CHUNK_SIZES), up_to(few, few, MIXED_SIZES)]
    return graphs if few == seqs else [*graphs, up_to(seqs, seqs, WIDE_SIZES)]
