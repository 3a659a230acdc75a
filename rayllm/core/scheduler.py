"""`Scheduler`: decides, step by step, which sequences compute how many tokens in which blocks.

One mixed batch a step under a token budget: decodes first, then prompts already being computed (in chunks), then
forked siblings, then sequences that were swapped out or wait (`admission`). A step's plan may be made while earlier
ones still run: sequences advance when they are *scheduled*, and the ids of tokens sampled in flight are filled in by
`update`. Freed blocks may be handed out at once, because workers execute plans in order.

All prompt blocks are allocated on admission, so only decoding sequences ever run out of blocks; then the last sequence
in policy order is preempted (`preemption`: its blocks are freed, and it waits to be recomputed or swapped in), until
the first in order alone remains, which always fits. Hence every sequence finishes.

A sequence whose blocks come from the host enters the batch at once, but its first tokens are computed in the next step:
the transfer overlaps with this one. Only if this step has nothing else to do it waits for the transfer.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable

from rayllm.api.types import (
    STEP_TOKEN_BUCKETS,
    EngineStats,
    GenerationRequest,
    KVCosts,
    RequestTimes,
    StepCost,
    StepPlan,
    StepResult,
    TokenDelta,
)
from rayllm.core.admission import Admission
from rayllm.core.batch import RunningBatch
from rayllm.core.beam_group import BeamGroups
from rayllm.core.chunk_budget import ChunkBudget, Pace
from rayllm.core.constraint import AwaitedMasks, MakeConstraint
from rayllm.core.decode import schedule_decodes
from rayllm.core.deltas import embedding_delta, token_delta
from rayllm.core.integrity import check_scheduler
from rayllm.core.kv_memory import KVMemory
from rayllm.core.policy import POLICIES
from rayllm.core.preemption import Preemption
from rayllm.core.prefill import schedule_chunk
from rayllm.core.queue import WaitingQueue
from rayllm.core.sequence import Sequence, SequenceGroup, SequenceStatus, derive_seed
from rayllm.core.stats import take_stats
from rayllm.core.step import Draft, InFlight

RUNNING, FORKED, FINISHED = SequenceStatus.RUNNING, SequenceStatus.FORKED, SequenceStatus.FINISHED


class Scheduler:
    """Queues, batch rows and blocks of one engine. Not thread-safe; knows neither torch nor Ray.

    num_cpu_blocks: of the host pool, for swapped sequences and for the prefix cache's second tier; 0 without.
    preemption_mode: "cost", "recompute" or "swap". costs: as the workers measured them, needed if there is a
    host pool. sliding_window: tokens that the layer that sees most sees; None for all. target_itl: seconds between the
    tokens of a decoding sequence that chunks of prompts are cut for; None for no such target. step_costs: as in
    `RankReady`. clock: seconds, for the times that requests report; nothing else is decided by it than the length of
    those chunks.

    Raises ValueError for limits that contradict each other.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        eos_token_ids: Iterable[int] = (),
        policy: str = "fcfs",
        enable_prefix_caching: bool = True,
        seed: int = 0,
        num_cpu_blocks: int = 0,
        preemption_mode: str = "cost",
        costs: KVCosts | None = None,
        sliding_window: int | None = None,
        target_itl: float | None = None,
        step_costs: dict[int, StepCost] | None = None,
        clock: Callable[[], float] = lambda: 0.0,
    ):
        if num_cpu_blocks and costs is None:
            raise ValueError("a host pool needs the measured costs")
        self.memory = KVMemory(
            num_blocks=num_blocks,
            num_cpu_blocks=num_cpu_blocks,
            block_size=block_size,
            caching=enable_prefix_caching,
            costs=costs,
            sliding_window=sliding_window,
            write_ahead=2 * max_num_batched_tokens // block_size,
        )
        if max_model_len > self.memory.window.longest(num_blocks):
            raise ValueError(
                f"max_model_len {max_model_len} exceeds the pool of {num_blocks} blocks of {block_size} tokens"
            )
        self.cache = self.memory.cache
        self.blocks = self.memory.gpu
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.eos_token_ids = frozenset(eos_token_ids)
        self.policy = POLICIES[policy]
        self.preemptive = policy == "priority"
        self.seed = seed
        self.groups: dict[str, SequenceGroup] = {}
        self.waiting = WaitingQueue()
        self.swapped = WaitingQueue()
        self.batch = RunningBatch(max_num_seqs)
        self.preemption = Preemption(preemption_mode, self.memory, self.batch, self.waiting, self.swapped, costs)
        self.admission = Admission(
            self.memory,
            self.batch,
            self.preemption,
            self.waiting,
            self.swapped,
            max_num_batched_tokens,
            self.preemptive,
        )
        self.beams = BeamGroups(
            self.memory, self.batch, self.waiting, self.swapped, self.groups, self._retire, self._times
        )
        self.forks: list[Sequence] = []
        self.in_flight: list[InFlight] = []
        self.awaited_masks = AwaitedMasks()
        self._failed: list[TokenDelta] = []  # last deltas of sequences whose constraint failed
        self._arrivals = itertools.count()
        self._step_ids = itertools.count()
        self.num_steps = 0
        self.prompt_tokens = self.generation_tokens = 0
        self._clock = clock
        self.step_tokens = [0] * (len(STEP_TOKEN_BUCKETS) + 1)
        self.computed_tokens = 0
        self.chunk_budget: ChunkBudget | None = None
        if target_itl is not None:
            self.chunk_budget = ChunkBudget(target_itl, max_num_batched_tokens, sliding_window, step_costs or {})
        self.to_report: list[str] = []  # requests with report_start that the last `schedule` started

    @property
    def running(self) -> list[Sequence]:
        """Sequences in the batch, in policy order."""
        return self.batch.sequences

    # ---------------------------------------------------------------------------------------------- requests

    def add(self, request: GenerationRequest, constrain: MakeConstraint | None = None) -> None:
        """Queue a valid request. Raises ValueError if its id is in use or its prompt can never fit.

        constrain: makes each completion's constraint, if the tokens are to be constrained.
        """
        prompt, params = request.prompt_token_ids, request.params
        if request.request_id in self.groups:
            raise ValueError(f"request id {request.request_id!r} is in use")
        longest = self.max_model_len - (request.pooling is None)
        if not 0 < len(prompt) <= longest:
            raise ValueError(f"a prompt has 1 to {longest} tokens, not {len(prompt)}")
        if request.pooling is not None and params.n != 1:
            raise ValueError(f"a pooled prompt has one embedding, not {params.n}")
        if params.use_beam_search and params.width > self.max_num_seqs:
            raise ValueError(f"{params.width} beams cannot run at once; max_num_seqs is {self.max_num_seqs}")
        arrival = next(self._arrivals)
        group = SequenceGroup.of(
            request,
            seed=derive_seed(self.seed, arrival + 1) if params.seed is None else params.seed,
            root_hash=self.cache.root(request.cache_salt),
            max_model_len=self.max_model_len,
            eos_token_ids=self.eos_token_ids,
            order=(*self.policy(request), arrival),
            constrain=constrain,
        )
        group.added_at = self._clock()
        self.groups[request.request_id] = group
        self.prompt_tokens += len(prompt)
        self.waiting.push(group.sequences[0])

    def abort(self, request_id: str) -> None:
        """End a request at once, whatever state it is in; unknown ids are ignored."""
        self._failed = [delta for delta in self._failed if delta.request_id != request_id]
        group = self.groups.pop(request_id, None)
        if group is None:
            return
        for seq in group.sequences:
            self._retire(seq)
        self.batch.drop_finished()

    def has_work(self) -> bool:
        """True while any request lives or any step is in flight."""
        return bool(self.groups or self.in_flight)

    def stats(self) -> EngineStats:
        """A snapshot of queues, pools and counters."""
        return take_stats(self)

    # ---------------------------------------------------------------------------------------------- one step

    def schedule(self) -> StepPlan | None:
        """The next step's plan, or None if nothing can run before a step in flight is done or a mask is known.

        A sequence whose constraint failed ends here; its last delta comes with the next `update` or `take_failed`.
        """
        draft = Draft(self.max_num_batched_tokens)
        if self.awaited_masks:
            self._look_for_masks()
        self.to_report = []
        if self.preemptive:
            self.admission.yield_to_urgent()
        prefilling = schedule_decodes(self.running, draft, self._grow)
        if self.chunk_budget is not None and draft.decodes:
            draft.pace = Pace(self.chunk_budget, len(draft.decodes))
        for seq in prefilling:
            if draft.budget and seq.status is RUNNING:  # a decode may have preempted it
                schedule_chunk(seq, self.memory, draft)
        self.admission.admit_forks(self.forks, draft, len(self.in_flight))
        self.admission.admit(draft)
        if draft.is_empty and not self.in_flight and not self.awaited_masks:
            self.admission.make_way(draft)
        if draft.arriving and draft.is_empty:
            self._schedule_arriving(draft)
        self.blocks.release(draft.copied)
        self.forks = draft.forked
        if draft.started:
            self._report(draft.started)
        if draft.is_empty:
            return None
        step_id, computed = next(self._step_ids), draft.num_tokens
        plan, record = draft.finish(
            step_id, self.batch.take_left_rows(), self.memory.take_moves(step_id, computed), self.batch.take_tokens()
        )
        self.num_steps += 1
        self.step_tokens[bisect.bisect_left(STEP_TOKEN_BUCKETS, computed)] += 1
        self.computed_tokens += computed
        if self.chunk_budget is not None:
            record.work = self.chunk_budget.work_of(len(draft.decodes), draft.ending + draft.partial)
            record.scheduled_at = self._clock()
        self.in_flight.append(record)
        return plan

    def _schedule_arriving(self, draft: Draft) -> None:
        """Compute at once what has just entered, waiting for its blocks: there is nothing else to do meanwhile."""
        draft.await_swap_ins = True
        for seq in draft.arriving:
            if draft.budget:
                schedule_chunk(seq, self.memory, draft)

    def _report(self, started: list[SequenceGroup]) -> None:
        """Note when requests were first admitted."""
        for group in started:
            group.started_at = self._clock()
            if group.report_start:
                self.to_report.append(group.request_id)

    def update(self, result: StepResult) -> list[TokenDelta]:
        """Take in the result of the oldest plan in flight: append tokens, end sequences, report what is new."""
        step = self.in_flight.pop(0)
        sizes = (len(step.sampled), len(step.pooled)) == (len(result.token_ids), len(result.embeddings))
        if step.step_id != result.step_id or not sizes:
            raise RuntimeError(f"result of step {result.step_id} does not belong to step {step.step_id}")
        if self.chunk_budget is not None and step.work is not None:
            self.chunk_budget.observe(step.work, step.scheduled_at, self._clock())
        for row, position, entries in result.prompt_logprobs:
            prompt_logprobs = step.by_row[row].group.prompt_logprobs
            if prompt_logprobs is not None:
                prompt_logprobs[position : position + len(entries)] = entries
        logprobs = result.logprobs
        register = self.memory.register
        deltas = self.take_failed()
        if step.pooled:
            deltas += self._embedded(step.pooled, result.embeddings)
        num_others, add = len(deltas), deltas.append
        any_finished = False
        for i, (seq, token) in enumerate(zip(step.sampled, result.token_ids, strict=True)):
            seq.num_pending -= 1
            token_ids = seq.token_ids
            length = len(token_ids) + 1
            if length <= seq.steady_known and logprobs is None and token not in seq.stop_ids:
                token_ids.append(token)
                add(TokenDelta(seq.request_id, seq.index, [token]))
                continue
            if seq.status is FINISHED:
                continue  # aborted, or found finished while this step was in flight: the token is dropped
            if seq.beam is not None:
                self.beams.take(seq, None if logprobs is None else logprobs[i])
                continue
            token_ids.append(token)
            if length > seq.next_full:
                register(seq, length - 1)
            entry = logprobs[i] if logprobs is not None else None
            delta = self._delta(seq, token, None if entry is None else [entry])
            any_finished |= delta.finish_reason is not None
            add(delta)
            if seq.constraint is not None and seq.status is not FINISHED:
                self.awaited_masks.add(seq, token)
            elif seq.status is RUNNING:
                seq.steady_known = min(seq.next_full, seq.max_len - 1)
        self.generation_tokens += len(deltas) - num_others
        if any_finished:
            self.batch.drop_finished()
        return deltas + self.beams.choose(self.forks) if self.beams.due else deltas

    def _embedded(self, pooled: list[Sequence], embeddings: list[bytes]) -> list[TokenDelta]:
        """End the pooled sequences whose embeddings have come; returns their only deltas."""
        deltas = []
        for seq, embedding in zip(pooled, embeddings, strict=True):
            seq.num_pending -= 1
            if seq.status is FINISHED:
                continue  # aborted
            self._retire(seq)
            del self.groups[seq.request_id]
            deltas.append(embedding_delta(seq, embedding, self._times(seq.group)))
        self.batch.drop_finished()
        return deltas

    def _times(self, group: SequenceGroup) -> RequestTimes:
        """For the first delta with a result."""
        return RequestTimes(group.started_at - group.added_at, self._clock() - group.started_at)

    def take_failed(self) -> list[TokenDelta]:
        """Last deltas of the sequences whose constraint failed, each once."""
        failed, self._failed = self._failed, []
        return failed

    def _look_for_masks(self) -> None:
        """Let sequences whose next mask has become known go on; end those whose constraint failed."""
        for seq, reason in self.awaited_masks.look():
            if seq.status is FINISHED:
                continue
            self._retire(seq)
            if seq.group.finished:
                del self.groups[seq.request_id]
            self._failed.append(TokenDelta(seq.request_id, seq.index, [], finish_reason="error", stop_reason=reason))
            self.batch.drop_finished()

    def _delta(self, seq: Sequence, token: int, logprobs: list | None) -> TokenDelta:
        """The delta of a token that may be more than that; retires the sequence if it is the last."""
        delta = token_delta(seq, token, logprobs, self._times)
        if delta.finish_reason is not None:
            self._retire(seq)
            if seq.group.finished:
                del self.groups[seq.request_id]
        return delta

    # ---------------------------------------------------------------------------------------------- the passes

    def _grow(self, seq: Sequence, draft: Draft) -> bool:
        """Give a sequence one more block, preempting from the end of the order. False if it had to go itself."""
        self.memory.drop_behind(seq)
        while not self.blocks.num_free:
            if self.forks:
                self.preemption.send_back(self.forks.pop())
                continue
            if self.preemption.preempt_last() is seq:
                return False
        index = seq.first_block + len(seq.block_table)
        draft.block_updates.append((seq.row, index, self.memory.extend_table(seq, 1)))
        return True

    def _retire(self, seq: Sequence) -> None:
        """End a sequence and free what it holds. If it runs, the caller drops it from the running list."""
        if seq.status is RUNNING:
            self.batch.free_row(seq)
        elif seq.status is FORKED:
            self.forks.remove(seq)
        self.waiting.remove(seq)
        self.swapped.remove(seq)
        self.blocks.release(seq.block_table)
        self.memory.release_swapped(seq)
        self.admission.forecast.ended(seq)
        seq.reset()
        seq.status = FINISHED

    def check_integrity(self) -> None:
        """Raise AssertionError if any record contradicts another. Called by tests after every operation."""
        check_scheduler(self)
