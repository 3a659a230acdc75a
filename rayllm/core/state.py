"""`SchedulerState`: the queue outside the batch, the batch, and all else that scheduling policies share.

Policies (admission, preemption, beam search) work on one `SchedulerState`; none of them calls the scheduler.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from rayllm.api.types import STEP_TOKEN_BUCKETS, RequestTimes
from rayllm.core.memory import KVMemory
from rayllm.core.sequence import Sequence, SequenceGroup, SequenceStatus, policy_order


class WaitingQueue:
    """Sequences outside the batch, a priority queue by `Sequence.key`. Push and peek are O(log n), remove is O(1)."""

    def __init__(self) -> None:
        # The counter breaks ties with a sequence's own stale entry: it may be pushed again after a removal.
        self._heap: list[tuple[tuple, int, Sequence]] = []
        self._pushes = itertools.count()
        self._members: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        """The members, in no particular order."""
        return iter(self._members.values())

    def __contains__(self, seq: Sequence) -> bool:
        return id(seq) in self._members

    def push(self, seq: Sequence) -> None:
        """Add a sequence at the place its key gives it; a preempted one thus comes before newer ones."""
        if id(seq) not in self._members:
            self._members[id(seq)] = seq
            heapq.heappush(self._heap, (seq.key, next(self._pushes), seq))

    def peek(self) -> Sequence | None:
        """The first in order, or None."""
        while self._heap and id(self._heap[0][2]) not in self._members:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def remove(self, seq: Sequence) -> None:
        """Take a sequence out, wherever it is."""
        self._members.pop(id(seq), None)


class RunningBatch:
    """The sequences that run, in policy order, and their rows of the workers' persistent batch."""

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


@dataclass(slots=True)
class Counters:
    """Figures that only grow, as `EngineStats` explains them."""

    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    computed_tokens: int = 0
    preemptions: int = 0
    swap_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    cpu_prefix_cache_queries: int = 0
    cpu_prefix_cache_hits: int = 0
    step_tokens: list[int] = field(default_factory=lambda: [0] * (len(STEP_TOKEN_BUCKETS) + 1))


class SchedulerState:
    """Queues, batch rows and blocks of one engine, and the operations that keep them consistent with each other."""

    def __init__(
        self,
        memory: KVMemory,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        eos_token_ids: Iterable[int] = (),
        preemptive: bool = False,
        clock: Callable[[], float] = lambda: 0.0,
    ):
        self.memory = memory
        self.max_num_seqs = max_num_seqs  # sequences that run at once
        self.max_num_batched_tokens = max_num_batched_tokens  # tokens that one step computes at most
        self.max_model_len = max_model_len  # tokens of a prompt and its output together
        self.eos_token_ids = frozenset(eos_token_ids)
        self.preemptive = preemptive  # whether more urgent requests preempt less urgent ones
        self.clock = clock  # seconds
        self.groups: dict[str, SequenceGroup] = {}  # live requests by id
        self.waiting = WaitingQueue()
        self.batch = RunningBatch(max_num_seqs)
        self.forks: list[Sequence] = []  # enter the batch in the next step
        self.awaiting_mask: list[Sequence] = []  # constrained, with a known last token and no mask for the next one
        self.counters = Counters()

    def retire(self, seq: Sequence) -> None:
        """End a sequence and free what it holds. If it runs, `batch.drop_finished` has to follow.

        A group that loses its last live sequence is forgotten.
        """
        if seq.status is SequenceStatus.RUNNING:
            self.batch.free_row(seq)
        elif seq.status is SequenceStatus.FORKED:
            self.forks.remove(seq)
        self.waiting.remove(seq)
        self.memory.gpu.release(seq.block_table)
        self.memory.unpin(seq)
        seq.reset()
        seq.status = SequenceStatus.FINISHED
        if seq.group.finished:
            self.groups.pop(seq.request_id, None)

    def send_back(self, seq: Sequence) -> None:
        """Free a sequence's device blocks and let it wait. What it finds in the prefix cache is not computed again."""
        self.memory.gpu.release(seq.block_table)
        seq.reset()
        seq.status = SequenceStatus.WAITING
        if not seq.awaits_choice:
            self.waiting.push(seq)

    def times(self, group: SequenceGroup) -> RequestTimes:
        """Where a request's time went, for its first delta with a result."""
        return RequestTimes(group.started_at - group.added_at, self.clock() - group.started_at)
