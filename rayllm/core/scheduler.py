"""`Scheduler`: decides, step by step, which sequences compute how many tokens in which blocks.

One mixed batch a step under a token budget: decodes first, then prompts already being computed (in chunks), then
forked siblings, then sequences that wait (`admission`). A step's plan may be made while earlier ones still run:
sequences advance when they are *scheduled*, and the ids of tokens sampled in flight are filled in by `update`. Freed
blocks may be handed out at once, because workers execute plans in order.

All prompt blocks are allocated on admission, so only decoding sequences ever run out of blocks; then the last sequence
in policy order is preempted (`preemption`: its blocks are freed, and it waits to be recomputed or brought back from the
host), until the first in order alone remains, which always fits. Hence every sequence finishes.

A sequence whose blocks come from the host enters the batch at once, but its first tokens are computed in the next step:
the transfer overlaps with this one. Only if this step has nothing else to do does it wait for the transfer.
"""

from __future__ import annotations

import bisect
import itertools

from rayllm.api.types import STEP_TOKEN_BUCKETS, EngineStats, GenerationRequest, StepPlan, StepResult, TokenDelta
from rayllm.core.admission import GROWTH_BLOCKS, Admission
from rayllm.core.beams import Beams
from rayllm.core.chunk_budget import ChunkBudget, StepChunks
from rayllm.core.passes import schedule_chunk, schedule_decodes
from rayllm.core.policy import Policy
from rayllm.core.preemption import Preemption, PreemptionMode
from rayllm.core.sequence import MakeConstraint, Sequence, SequenceStatus, derive_seed, make_group
from rayllm.core.state import SchedulerState
from rayllm.core.step import Draft, InFlight

RUNNING, FINISHED = SequenceStatus.RUNNING, SequenceStatus.FINISHED


class Scheduler:
    """Queues, batch rows and blocks of one engine. Not thread-safe; knows neither torch nor Ray.

    state: empty; the scheduler and its policies are the only ones to change it from now on.
    policy: a request's place in the order.
    preemption_mode: what becomes of the KV of a preempted sequence.
    chunk_budget: cuts chunks of prompts for a target inter-token latency; None for chunks as long as the token budget.
    seed: of requests without one.
    growth_blocks: that admission leaves free for each running sequence that may outgrow its own.

    Raises ValueError for limits that contradict each other.
    """

    def __init__(
        self,
        state: SchedulerState,
        *,
        policy: Policy,
        preemption_mode: PreemptionMode = "cost",
        chunk_budget: ChunkBudget | None = None,
        seed: int = 0,
        growth_blocks: int = GROWTH_BLOCKS,
    ):
        memory = state.memory
        if state.max_model_len > memory.window.longest(memory.gpu.num_blocks):
            raise ValueError(
                f"max_model_len {state.max_model_len} exceeds the pool of {memory.gpu.num_blocks} blocks of "
                f"{memory.block_size} tokens"
            )
        self.state = state
        self.in_flight: list[InFlight] = []  # plans without results, oldest first
        self.to_report: list[str] = []  # requests with report_start that the last `schedule` started
        self._policy = policy
        self._preemption = Preemption(state, preemption_mode)
        self._admission = Admission(state, self._preemption, growth_blocks)
        self._beams = Beams(state)
        self.chunk_budget = chunk_budget
        self._seed = seed
        self._failed: list[TokenDelta] = []  # last deltas of sequences whose constraint failed
        self._arrivals = itertools.count()
        self._step_ids = itertools.count()

    # ---------------------------------------------------------------------------------------------- requests

    def add(self, request: GenerationRequest, constrain: MakeConstraint | None = None) -> None:
        """Queue a request that fits the engine's limits and whose id is not in use.

        constrain: makes each completion's constraint, if the tokens are to be constrained.
        """
        state, params = self.state, request.params
        arrival = next(self._arrivals)
        group = make_group(
            request,
            seed=derive_seed(self._seed, arrival + 1) if params.seed is None else params.seed,
            root_hash=state.memory.root_hash(request.cache_salt),
            max_model_len=state.max_model_len,
            eos_token_ids=state.eos_token_ids,
            order=(*self._policy(request), arrival),
            constrain=constrain,
        )
        group.added_at = state.clock()
        state.groups[request.request_id] = group
        state.counters.prompt_tokens += len(request.prompt_token_ids)
        state.waiting.push(group.sequences[0])

    def abort(self, request_id: str) -> None:
        """End a request at once, whatever state it is in; unknown ids are ignored."""
        self._failed = [delta for delta in self._failed if delta.request_id != request_id]
        group = self.state.groups.pop(request_id, None)
        if group is None:
            return
        for seq in group.sequences:
            self.state.retire(seq)
        self.state.batch.drop_finished()

    def has_work(self) -> bool:
        """True while any request lives or any step is in flight."""
        return bool(self.state.groups or self.in_flight)

    # ---------------------------------------------------------------------------------------------- one step

    def schedule(self) -> StepPlan | None:
        """The next step's plan, or None if nothing can run before a step in flight is done or a mask is known.

        A sequence whose constraint failed ends here; its last delta comes with the next `update` or `take_failed`.
        """
        state, admission = self.state, self._admission
        draft = Draft(state.max_num_batched_tokens)
        if state.awaiting_mask:
            self._open_gates()
        self.to_report = []
        if state.preemptive:
            admission.yield_to_urgent()
        prefilling = schedule_decodes(state, self._preemption, draft)
        if self.chunk_budget is not None and draft.decodes:
            draft.chunks = StepChunks(self.chunk_budget, len(draft.decodes))
        for seq in prefilling:
            if draft.budget and seq.status is RUNNING:  # a decode may have preempted it
                schedule_chunk(seq, state.memory, draft)
        admission.admit_forks(draft)
        admission.admit(draft)
        if draft.is_empty and not self.in_flight and not state.awaiting_mask:
            admission.make_way(draft)
        if draft.arriving and draft.is_empty:
            # There is nothing else to do while their blocks arrive: compute these at once, waiting for the blocks.
            draft.await_swap_ins = True
            for seq in draft.arriving:
                if draft.budget:
                    schedule_chunk(seq, state.memory, draft)
        state.memory.gpu.release(draft.copied)
        state.forks = draft.forked
        for group in draft.started:
            group.started_at = state.clock()
            if group.report_start:
                self.to_report.append(group.request_id)
        return None if draft.is_empty else self._finish(draft)

    def _finish(self, draft: Draft) -> StepPlan:
        """Make a plan of a draft that computes something, and count it."""
        state, step_id, computed = self.state, next(self._step_ids), draft.num_tokens
        moves = state.memory.take_moves(step_id, computed)
        plan, record = draft.finish(step_id, state.batch.take_left_rows(), moves, state.batch.take_tokens())
        state.counters.steps += 1
        state.counters.step_tokens[bisect.bisect_left(STEP_TOKEN_BUCKETS, computed)] += 1
        state.counters.computed_tokens += computed
        if self.chunk_budget is not None:
            record.work = self.chunk_budget.work_of(len(draft.decodes), draft.ending + draft.partial)
            record.scheduled_at = state.clock()
        self.in_flight.append(record)
        return plan

    def update(self, result: StepResult) -> list[TokenDelta]:
        """Take in the result of the oldest plan in flight: append tokens, end sequences, report what is new."""
        step = self.in_flight.pop(0)
        sizes = (len(step.sampled), len(step.pooled)) == (len(result.token_ids), len(result.embeddings))
        if step.step_id != result.step_id or not sizes:
            raise RuntimeError(f"result of step {result.step_id} does not belong to step {step.step_id}")
        if self.chunk_budget is not None and step.work is not None:
            self.chunk_budget.observe(step.work, step.scheduled_at, self.state.clock())
        for row, position, entries in result.prompt_logprobs:
            prompt_logprobs = step.by_row[row].group.prompt_logprobs
            if prompt_logprobs is not None:
                prompt_logprobs[position : position + len(entries)] = entries
        deltas = self.take_failed()
        if step.pooled:
            deltas += self._take_embeddings(step.pooled, result.embeddings)
        self._take_tokens(step.sampled, result, deltas)
        return deltas + self._beams.choose()

    def _take_tokens(self, sampled: list[Sequence], result: StepResult, deltas: list[TokenDelta]) -> None:
        """Append the sampled tokens to their sequences, and what fronts are told of them to `deltas`.

        This loop runs over all running sequences in every step: it is written for speed.
        """
        state, logprobs = self.state, result.logprobs
        register, add, num_others = state.memory.register, deltas.append, len(deltas)
        any_finished = False
        for i, (seq, token) in enumerate(zip(sampled, result.token_ids, strict=True)):
            seq.num_pending -= 1
            token_ids = seq.token_ids
            length = len(token_ids) + 1
            if length <= seq.steady_known and logprobs is None and token not in seq.stop_ids:
                token_ids.append(token)
                add(TokenDelta(seq.request_id, seq.index, [token]))
                continue
            if seq.status is FINISHED:
                continue  # aborted, or found finished while this step was in flight: the token is dropped
            entry = None if logprobs is None else logprobs[i]
            gate = seq.gate
            if gate is not None and gate.beam is not None:
                self._beams.take(seq, gate.beam, entry)
                continue
            token_ids.append(token)
            if length > seq.next_full:
                register(seq, length - 1)
            delta = self._token_delta(seq, token, None if entry is None else [entry])
            add(delta)
            if delta.finish_reason is not None:
                state.retire(seq)
                any_finished = True
            elif gate is not None and gate.constraint is not None:
                gate.constraint.accept(token)
                state.awaiting_mask.append(seq)
            elif seq.status is RUNNING:
                seq.steady_known = min(seq.next_full, seq.max_len - 1)
        state.counters.generation_tokens += len(deltas) - num_others
        if any_finished:
            state.batch.drop_finished()

    def _token_delta(self, seq: Sequence, token: int, logprobs: list | None) -> TokenDelta:
        """Of a token that has been appended to a sequence. Its first has what is known of the request by then."""
        group, reason, stop = seq.group, None, None
        if token in seq.stop_ids:
            reason = "stop"
            stop = token if token in group.params.stop_token_ids else None
        elif len(seq.token_ids) >= seq.max_len:
            reason = "length"
        cached, prompt_logprobs, times = 0, None, None
        if seq.fresh:
            seq.fresh = False
            cached = group.num_cached_tokens or 0
            if seq.index == 0:
                prompt_logprobs, times = group.prompt_logprobs, self.state.times(group)
        return TokenDelta(
            seq.request_id,
            seq.index,
            [token],
            logprobs,
            reason,
            stop,
            cached,
            prompt_logprobs,
            times,
            num_preemptions=group.num_preemptions,
        )

    def _take_embeddings(self, pooled: list[Sequence], embeddings: list[bytes]) -> list[TokenDelta]:
        """End the pooled sequences whose embeddings have come; returns their only deltas."""
        deltas = []
        for seq, embedding in zip(pooled, embeddings, strict=True):
            seq.num_pending -= 1
            if seq.status is FINISHED:
                continue  # aborted
            group = seq.group
            self.state.retire(seq)
            delta = TokenDelta(
                seq.request_id,
                seq.index,
                [],
                finish_reason="stop",
                num_cached_tokens=group.num_cached_tokens or 0,
                times=self.state.times(group),
                num_preemptions=group.num_preemptions,
                embedding=embedding,
            )
            deltas.append(delta)
        self.state.batch.drop_finished()
        return deltas

    def take_failed(self) -> list[TokenDelta]:
        """Last deltas of the sequences whose constraint failed, each once."""
        failed, self._failed = self._failed, []
        return failed

    def _open_gates(self) -> None:
        """Let constrained sequences go on whose next mask has become known; end those whose constraint failed."""
        state = self.state
        awaiting, state.awaiting_mask = state.awaiting_mask, []
        for seq in awaiting:
            if seq.status is FINISHED:
                continue
            assert seq.gate is not None and seq.gate.constraint is not None
            if (reason := seq.gate.constraint.error()) is not None:
                state.retire(seq)
                failed = TokenDelta(seq.request_id, seq.index, [], finish_reason="error", stop_reason=reason)
                self._failed.append(failed)
            elif seq.gate.constraint.mask() is None:
                state.awaiting_mask.append(seq)
            else:
                seq.gate.closed = False
        if self._failed:
            state.batch.drop_finished()

    # ---------------------------------------------------------------------------------------------- figures

    def stats(self) -> EngineStats:
        """A snapshot of queues, pools and counters."""
        state, memory, counters = self.state, self.state.memory, self.state.counters
        return EngineStats(
            num_running=len(state.batch.sequences),
            num_waiting=len(state.waiting) + len(state.forks) - memory.num_swapped,
            num_swapped=memory.num_swapped,
            num_used_blocks=memory.gpu.num_blocks - memory.gpu.num_free,
            num_total_blocks=memory.gpu.num_blocks,
            num_preemptions=counters.preemptions,
            num_steps=counters.steps,
            prompt_tokens=counters.prompt_tokens,
            generation_tokens=counters.generation_tokens,
            prefix_cache_queries=counters.prefix_cache_queries,
            prefix_cache_hits=counters.prefix_cache_hits,
            step_tokens=counters.step_tokens.copy(),
            computed_tokens=counters.computed_tokens,
            num_swap_preemptions=counters.swap_preemptions,
            cpu_prefix_cache_hits=counters.cpu_prefix_cache_hits,
            num_used_cpu_blocks=memory.cpu.num_blocks - memory.cpu.num_free,
            num_cached_cpu_blocks=len(memory.cpu_cache),
            num_total_cpu_blocks=memory.cpu.num_blocks,
            swapped_out_blocks=memory.num_swapped_out,
            swapped_in_blocks=memory.num_swapped_in,
            cpu_prefix_cache_queries=counters.cpu_prefix_cache_queries,
            prefill_chunk_limit=0 if self.chunk_budget is None else self.chunk_budget.limit,
        )
