"""From a StepPlan to the tensors of a step: `PersistentBatch` keeps the rows, `build` is a pure function of both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from rayllm.api.types import StepPlan
from rayllm.layers.batch import ForwardBatch
from rayllm.sampling.transfer import to_device


class PersistentBatch:
    """What a worker knows of each row: counts on the host, blocks and tokens on the device.

    num_tokens, num_computed, num_prompt: [max_num_seqs] int64. num_tokens counts sampled tokens whose ids only the
    device knows yet. block_table: [max_num_seqs + 1, max blocks] int32, and token_table: [max_num_seqs + 1,
    max_model_len] int32, both on the device, where captured steps read them, and where a sampled token is the next
    step's input without passing through the host; their last rows are those of padding.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device):
        self.block_size = block_size
        self.num_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_computed = np.zeros(max_num_seqs, np.int64)
        self.num_prompt = np.zeros(max_num_seqs, np.int64)
        max_blocks = -(-max_model_len // block_size)
        self.block_table = torch.zeros(max_num_seqs + 1, max_blocks, dtype=torch.int32, device=device)
        self.token_table = torch.zeros(max_num_seqs + 1, max_model_len, dtype=torch.int32, device=device)

    def apply(self, plan: StepPlan) -> None:
        """Let the plan's new sequences in, extend block tables, and replace tokens that were not to be taken."""
        for data in plan.new:
            row, length = data.row, len(data.token_ids)
            self.num_tokens[row] = length
            self.num_computed[row] = data.num_computed_tokens
            self.num_prompt[row] = data.num_prompt_tokens
            (tokens,) = to_device([np.array(data.token_ids, np.int32)], self.token_table.device)
            self.token_table[row, :length] = tokens
        # What lies before the first block of a table is never read.
        updates = [(data.row, data.first_block, data.block_table) for data in plan.new] + plan.block_updates
        if updates:
            width = self.block_table.shape[1]
            starts = np.array([row * width + first for row, first, _ids in updates], np.int64)
            counts = np.array([len(ids) for _row, _first, ids in updates], np.int64)
            ends = np.cumsum(counts)
            places = np.arange(int(ends[-1])) + np.repeat(starts - ends + counts, counts)
            blocks = np.fromiter((block for _row, _first, ids in updates for block in ids), np.int32, int(ends[-1]))
            index, values = to_device([places, blocks], self.block_table.device)
            self.block_table.view(-1).index_copy_(0, index, values)
        if plan.tokens:
            rows, ids = np.array(plan.tokens, np.int64).T
            where = to_device([rows, self.num_tokens[rows] - 1, ids.astype(np.int32)], self.token_table.device)
            self.token_table[where[0], where[1]] = where[2]

    def check_integrity(self) -> None:
        """Raise AssertionError unless every row's counts are possible."""
        assert (self.num_computed <= self.num_tokens).all(), "a row has computed tokens that it does not have"
        assert (self.num_prompt <= self.num_tokens).all(), "a row has lost prompt tokens"
        assert (self.num_tokens <= self.token_table.shape[1]).all(), "a row is longer than max_model_len"

    def advance(self, rows: np.ndarray, counts: np.ndarray | int, num_sampled: int) -> None:
        """Count what a step computes in its rows, and the tokens that the first num_sampled of them sample."""
        self.num_computed[rows] += counts
        self.num_tokens[rows[:num_sampled]] += 1


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step's ForwardBatch and, on the host, which rows compute how many tokens from which position on.

    rows, counts, starts: [S] int64.
    """

    batch: ForwardBatch
    rows: np.ndarray
    counts: np.ndarray
    starts: np.ndarray

    def spans(self) -> Iterator[tuple[int, int, int, int]]:
        """(row, position of its first token, how many, index of the first in the step) of each sequence."""
        firsts = self.counts.cumsum() - self.counts
        columns = (self.rows, self.starts, self.counts, firsts)
        return zip(*(column.tolist() for column in columns), strict=True)


def build(state: PersistentBatch, plan: StepPlan, split_decodes: bool = True) -> StepInputs:
    """The tensors of one step. Reads `state` (after `apply`), changes nothing.

    split_decodes: the plan's decodes get the decode kernel; otherwise they are chunks of one token.
    """
    rows = np.array(plan.rows, np.int64)
    counts = np.array(plan.num_tokens, np.int64)
    starts = state.num_computed[rows]
    ends, seq_lens = np.cumsum(counts), starts + counts
    # A token's position: its index in the step, shifted so that each sequence begins at its own start.
    positions = np.arange(int(ends[-1])) + np.repeat(starts - ends + counts, counts)
    decodes = plan.num_decodes if split_decodes else 0
    wide = [np.repeat(rows, counts), positions, rows, ends[: plan.num_sampled] - 1]
    narrow = [seq_lens.astype(np.int32), np.append(0, ends).astype(np.int32)]
    token_rows, where, seq_rows, logit_rows, lens, token_starts = to_device([*wide, *narrow], state.block_table.device)
    size = state.block_size
    batch = ForwardBatch(
        input_ids=state.token_table[token_rows, where].to(torch.int64),
        positions=where,
        slot_mapping=state.block_table[token_rows, where // size].to(torch.int64) * size + where % size,
        block_tables=state.block_table[:, : -(-int(seq_lens.max()) // size)].index_select(0, seq_rows),
        seq_lens=lens,
        query_start_loc=token_starts,
        logit_rows=logit_rows,
        num_decodes=decodes,
        max_query_len=int(counts[decodes:].max(initial=0)),
    )
    return StepInputs(batch, rows, counts, starts)
