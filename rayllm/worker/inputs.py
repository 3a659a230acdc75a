"""From a StepPlan to the tensors of a step: `PersistentBatch` keeps the rows; a step's layout is a function of both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from rayllm.api.types import StepPlan
from rayllm.layers.batch import ChunkLengths, ForwardBatch
from rayllm.sampling.transfer import to_device
from rayllm_kernels import ops


class PersistentBatch:
    """What a worker knows of each row: counts on the host, blocks and tokens on the device.

    num_tokens, num_computed, num_prompt: [max_num_seqs] int64. num_tokens counts sampled tokens whose ids only the
    device knows yet. block_tables: [num_groups, max_num_seqs + 1, max blocks] int32, one table for each group of
    layers, and token_table: [max_num_seqs + 1, max_model_len] int32, both on the device, where captured steps read
    them, and where a sampled token is the next step's input without passing through the host; their last rows are those
    of padding.
    """

    def __init__(
        self, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device, num_groups: int = 1
    ):
        self.block_size = block_size
        self.num_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_computed = np.zeros(max_num_seqs, np.int64)
        self.num_prompt = np.zeros(max_num_seqs, np.int64)
        max_blocks = -(-max_model_len // block_size)
        self.block_tables = torch.zeros(num_groups, max_num_seqs + 1, max_blocks, dtype=torch.int32, device=device)
        self.token_table = torch.zeros(max_num_seqs + 1, max_model_len, dtype=torch.int32, device=device)
        # Where each row's adapter is, -1 without one: on the host, and on the device with a row of padding.
        self._any_adapters = False  # so far
        self.adapter_slots = np.full(max_num_seqs, -1, np.int32)
        self.adapter_table = torch.full((max_num_seqs + 1,), -1, dtype=torch.int32, device=device)

    def apply(self, plan: StepPlan) -> None:
        """Let the plan's new sequences in, extend block tables, and replace tokens that were not to be taken."""
        for data in plan.new:
            self.num_tokens[data.row] = len(data.token_ids)
            self.num_computed[data.row] = data.num_computed_tokens
            self.num_prompt[data.row] = data.num_prompt_tokens
        tokens = [np.array(data.token_ids, np.int32) for data in plan.new]
        # What lies before the first block of a table is never read.
        _num_groups, height, width = self.block_tables.shape
        updates = [  # (where in all tables, as if they were one after the other, and the blocks that go there)
            ((group * height + data.row) * width + first, ids)
            for data in plan.new
            for group, (first, ids) in enumerate(zip(data.first_blocks, data.block_tables, strict=True))
        ]
        for row, first, parts in plan.block_updates:
            updates += [((group * height + row) * width + first, ids) for group, ids in enumerate(parts)]
        if updates:
            starts = np.array([start for start, _ids in updates], np.int64)
            counts = np.array([len(ids) for _start, ids in updates], np.int64)
            ends = np.cumsum(counts)
            places = np.arange(int(ends[-1])) + np.repeat(starts - ends + counts, counts)
            blocks = np.fromiter((block for _start, ids in updates for block in ids), np.int32, int(ends[-1]))
            index, values, *rows = to_device([places, blocks, *tokens], self.block_tables.device)
            self.block_tables.view(-1).index_copy_(0, index, values)
            for data, ids in zip(plan.new, rows, strict=True):
                self.token_table[data.row, : len(ids)] = ids
        moved = [data for data in plan.new if data.adapter_slot != self.adapter_slots[data.row]]
        if moved:
            self._any_adapters = True
            of_rows = np.array([data.row for data in moved], np.int64)
            self.adapter_slots[of_rows] = [data.adapter_slot for data in moved]
            where = to_device([of_rows, self.adapter_slots[of_rows]], self.adapter_table.device)
            self.adapter_table.index_copy_(0, where[0], where[1])
        if plan.tokens:
            rows, ids = np.array(plan.tokens, np.int64).T
            where = to_device([rows, self.num_tokens[rows] - 1, ids.astype(np.int32)], self.token_table.device)
            self.token_table[where[0], where[1]] = where[2]

    def check_integrity(self) -> None:
        """Raise AssertionError unless every row's counts are possible."""
        assert (self.num_computed <= self.num_tokens).all(), "a row has computed tokens that it does not have"
        assert (self.num_prompt <= self.num_tokens).all(), "a row has lost prompt tokens"
        assert (self.num_tokens <= self.token_table.shape[1]).all(), "a row is longer than max_model_len"

    def has_adapters(self, rows: np.ndarray) -> bool:
        """Whether any of these rows has one."""
        return self._any_adapters and bool((self.adapter_slots[rows] >= 0).any())

    def advance(self, rows: np.ndarray, counts: np.ndarray | int, num_sampled: int) -> None:
        """Count what a step computes in its rows, and the tokens that the first num_sampled of them sample."""
        self.num_computed[rows] += counts
        self.num_tokens[rows[:num_sampled]] += 1


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Which rows compute how many tokens from which position on, on the host: decodes first, as in the plan.

    rows, counts, starts: [S] int64. num_decodes: leading rows that the decode kernel attends. num_sampled: leading rows
    that sample a token.
    """

    rows: np.ndarray
    counts: np.ndarray
    starts: np.ndarray
    num_decodes: int
    num_sampled: int

    @property
    def num_tokens(self) -> int:
        """Of the step."""
        return int(self.counts.sum())

    @property
    def chunks(self) -> ChunkLengths:
        """Of the rows that the decode kernel does not attend."""
        return ChunkLengths(self.starts[self.num_decodes :], self.counts[self.num_decodes :])

    @property
    def seq_lens(self) -> np.ndarray:
        """[S] int64, of each row's context after the step."""
        return self.starts + self.counts

    @property
    def query_starts(self) -> np.ndarray:
        """[S + 1] int64, the index of each row's first token in the step, and that behind the last one's last."""
        return np.concatenate(([0], np.cumsum(self.counts)))

    @property
    def positions(self) -> np.ndarray:
        """[T] int64, where each token stands in its sequence."""
        # A token's index in the step, shifted so that each sequence begins at its own start.
        return np.arange(self.num_tokens) + np.repeat(self.starts - self.query_starts[:-1], self.counts)

    def spans(self) -> Iterator[tuple[int, int, int, int]]:
        """(row, position of its first token, how many, index of the first in the step) of each sequence."""
        columns = (self.rows, self.starts, self.counts, self.query_starts[:-1])
        return zip(*(column.tolist() for column in columns), strict=True)


def lay_out(state: PersistentBatch, plan: StepPlan, split_decodes: bool = True) -> StepLayout:
    """A step's layout. Reads `state` (after `apply`), changes nothing.

    split_decodes: the plan's decodes get the decode kernel; otherwise they are chunks of one token.
    """
    rows, counts = np.array(plan.rows, np.int64), np.array(plan.num_tokens, np.int64)
    decodes = plan.num_decodes if split_decodes else 0
    return StepLayout(rows, counts, state.num_computed[rows], decodes, plan.num_sampled)


def build(state: PersistentBatch, layout: StepLayout) -> ForwardBatch:
    """The tensors of a step that is not captured. Reads `state` (after `apply`), changes nothing."""
    query_starts, seq_lens = layout.query_starts, layout.seq_lens
    token_rows, positions, seq_rows, logit_rows, lens, starts = to_device(
        [
            np.repeat(layout.rows, layout.counts),
            layout.positions,
            layout.rows,
            query_starts[1 : layout.num_sampled + 1] - 1,
            seq_lens.astype(np.int32),
            query_starts.astype(np.int32),
        ],
        state.block_tables.device,
    )
    input_ids = torch.empty_like(token_rows)
    slots = token_rows.new_empty(state.block_tables.shape[0], token_rows.shape[0])
    ops.token_inputs(token_rows, positions, state.token_table, state.block_tables, state.block_size, input_ids, slots)
    width = -(-int(seq_lens.max()) // state.block_size)
    return ForwardBatch(
        input_ids=input_ids,
        positions=positions,
        slot_mappings=slots.unbind(),
        block_tables=state.block_tables[:, :, :width].index_select(1, seq_rows).unbind(),
        seq_lens=lens,
        query_start_loc=starts,
        logit_rows=logit_rows,
        num_decodes=layout.num_decodes,
        max_query_len=int(layout.chunks.tokens.max(initial=0)),
        chunks=layout.chunks,
        adapter_slots=state.adapter_table[token_rows] if state.has_adapters(layout.rows) else None,
    )
