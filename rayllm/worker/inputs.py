"""From a StepPlan to the tensors of a step: `PersistentBatch` keeps the rows, `build` is a pure function of both."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from rayllm.api.types import StepPlan
from rayllm.layers.batch import ForwardBatch


class PersistentBatch:
    """What a worker knows of each row. Host arrays, and the tokens themselves on the device.

    num_tokens, num_computed, num_prompt: [max_num_seqs] int64. num_tokens counts sampled tokens whose ids only the
    device knows yet. block_table: [max_num_seqs, max blocks] int32. token_table: [max_num_seqs + 1, max_model_len]
    int32 on the device, so that a sampled token is the next step's input without passing through the host; its last
    row takes the tokens of padding.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device):
        self.block_size = block_size
        self.num_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_computed = np.zeros(max_num_seqs, np.int64)
        self.num_prompt = np.zeros(max_num_seqs, np.int64)
        self.block_table = np.zeros((max_num_seqs, -(-max_model_len // block_size)), np.int32)
        self.token_table = torch.zeros(max_num_seqs + 1, max_model_len, dtype=torch.int32, device=device)

    def apply(self, plan: StepPlan) -> None:
        """Let the plan's new sequences in, extend block tables, and replace tokens that were not to be taken."""
        for data in plan.new:
            row, length = data.row, len(data.token_ids)
            self.num_tokens[row] = length
            self.num_computed[row] = data.num_computed_tokens
            self.num_prompt[row] = data.num_prompt_tokens
            first = data.first_block  # what lies before it is never read
            self.block_table[row, first : first + len(data.block_table)] = data.block_table
            (tokens,) = to_device([np.array(data.token_ids, np.int32)], np.int32, self.token_table.device)
            self.token_table[row, :length] = tokens
        for row, first, ids in plan.block_updates:
            self.block_table[row, first : first + len(ids)] = ids
        if plan.tokens:
            rows, ids = np.array(plan.tokens, np.int64).T
            where = to_device([rows, self.num_tokens[rows] - 1, ids], np.int64, self.token_table.device)
            self.token_table[where[0], where[1]] = where[2].to(torch.int32)

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
    num_sampled: int

    @property
    def sampled_rows(self) -> np.ndarray:
        """Rows that sample, [num_sampled]."""
        return self.rows[: self.num_sampled]

    @property
    def sampled_positions(self) -> np.ndarray:
        """Where the sampled tokens will stand in their sequences, [num_sampled]."""
        return (self.starts + self.counts)[: self.num_sampled]


def build(state: PersistentBatch, plan: StepPlan, device: torch.device, split_decodes: bool = True) -> StepInputs:
    """The tensors of one step. Reads `state` (after `apply`), changes nothing.

    split_decodes: the plan's decodes get the decode kernel; otherwise they are chunks of one token.
    """
    rows = np.array(plan.rows, np.int64)
    counts = np.array(plan.num_tokens, np.int64)
    starts = state.num_computed[rows]
    ends = np.cumsum(counts)
    total = int(ends[-1])
    token_rows = np.repeat(rows, counts)
    # A token's position: its index in the step, shifted so that each sequence begins at its own start.
    positions = np.arange(total) + np.repeat(starts - ends + counts, counts)
    size = state.block_size
    slots = state.block_table[token_rows, positions // size].astype(np.int64) * size + positions % size
    logit_rows = ends[: plan.num_sampled] - 1
    seq_lens = starts + counts
    tables = state.block_table[rows, : -(-int(seq_lens.max()) // size)]
    decodes = plan.num_decodes if split_decodes else 0
    wide = to_device([token_rows, positions, slots, logit_rows], np.int64, device)
    narrow = to_device([seq_lens, np.append(0, ends), tables.ravel()], np.int32, device)
    batch = ForwardBatch(
        input_ids=state.token_table[wide[0], wide[1]].to(torch.int64),
        positions=wide[1],
        slot_mapping=wide[2],
        block_tables=narrow[2].view(len(rows), -1),
        seq_lens=narrow[0],
        query_start_loc=narrow[1],
        logit_rows=wide[3],
        num_decodes=decodes,
        max_query_len=int(counts[decodes:].max(initial=0)),
    )
    return StepInputs(batch, rows, counts, starts, plan.num_sampled)


def to_device(arrays: list[np.ndarray], dtype: type, device: torch.device) -> list[torch.Tensor]:
    """Move arrays to the device in one copy; returns views of it, one an array."""
    sizes = [array.size for array in arrays]
    packed = torch.from_numpy(np.concatenate(arrays).astype(dtype, copy=False))
    if device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    return list(packed.split(sizes))
