"""`RunningBatch`: the sequences that run, and their rows of the workers' persistent batch."""

from __future__ import annotations

import bisect

from rayllm.core.sequence import Sequence, SequenceStatus, policy_order


class RunningBatch:
    """sequences: those that run, in policy order. free_rows: rows that nobody has."""

    def __init__(self, max_num_seqs: int):
        self.max_num_seqs = max_num_seqs
        self.sequences: list[Sequence] = []
        self.free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._left: list[int] = []
        self._tokens: dict[int, int] = {}

    def enter(self, seq: Sequence) -> None:
        """Give a sequence a row; there must be a free one."""
        seq.status = SequenceStatus.RUNNING
        seq.row = self.free_rows.pop()
        bisect.insort(self.sequences, seq, key=policy_order)

    def pop_last(self) -> Sequence:
        """Take the last sequence in policy order out."""
        seq = self.sequences.pop()
        self.free_row(seq)
        return seq

    def free_row(self, seq: Sequence) -> None:
        """Take a sequence's row back. Unless it was popped, `drop_finished` has to follow."""
        self._left.append(seq.row)
        self._tokens.pop(seq.row, None)
        self.free_rows.append(seq.row)
        seq.row = -1

    def drop_finished(self) -> None:
        """Take out the sequences that do not run any more."""
        self.sequences = [seq for seq in self.sequences if seq.status is SequenceStatus.RUNNING]

    def set_token(self, seq: Sequence, token: int) -> None:
        """Let the next plan replace the newest token of a running sequence."""
        self._tokens[seq.row] = token

    def take_tokens(self) -> list[tuple[int, int]]:
        """(row, token id) as set since the last call, of sequences that still have their rows."""
        tokens, self._tokens = self._tokens, {}
        return list(tokens.items())

    def take_left_rows(self) -> list[int]:
        """Rows freed since the last call, for the workers to forget."""
        left, self._left = self._left, []
        return left

    def check_integrity(self) -> None:
        """Raise AssertionError if a row is lost or held twice, or the order is wrong."""
        rows = [seq.row for seq in self.sequences]
        assert sorted(rows + self.free_rows) == list(range(self.max_num_seqs)), "rows are lost or held twice"
        assert self.sequences == sorted(self.sequences, key=policy_order), "running is out of order"
