"""`Scheduler`: decides, step by step, which sequences compute how many tokens in which blocks.

One mixed batch a step (`Step`) under a token budget: decodes first, then prompts already being computed (in chunks),
then forked siblings, then sequences that wait. A step's plan may be made while earlier ones still run: sequences
advance when they are *scheduled*, and the ids of tokens sampled in flight are filled in by `update`. Freed blocks may
be handed out at once, because workers execute plans in order.

All prompt blocks are allocated on admission, so only decoding sequences ever run out of blocks; then the last sequence
in policy order is preempted (its blocks are freed, and it waits to be recomputed or brought back from the host), until
the first in order alone remains, which always fits. Hence every sequence finishes.

A sequence whose blocks come from the host enters the batch at once, but its first tokens are computed in the next step:
the transfer overlaps with this one. Only if this step has nothing else to do does it wait for the transfer.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from msgspec.structs import asdict

from rayllm.api.types import (
    FATAL_DEATHS,
    STEP_TOKEN_BUCKETS,
    EngineStats,
    GenerationRequest,
    SequenceData,
    StepPlan,
    StepResult,
    TokenDelta,
    TokenLogprobs,
)
from rayllm.core import beam
from rayllm.core.chunk_budget import ChunkBudget, StepChunks, StepWork
from rayllm.core.memory import Match
from rayllm.core.policy import Policy
from rayllm.core.sequence import Beam, BeamSearch, Gate, MakeConstraint, Sequence, SequenceGroup, SequenceStatus
from rayllm.core.state import SchedulerState
from rayllm.core.suspects import Suspects

RUNNING, FINISHED = SequenceStatus.RUNNING, SequenceStatus.FINISHED
WATERMARK = 0.01  # share of the blocks that admission leaves free


@dataclass(slots=True)
class InFlight:
    """A plan whose result is not there yet."""

    step_id: int
    # The sequences that sample, and those whose embeddings come, each in the plan's order.
    sampled: list[Sequence]
    pooled: list[Sequence]
    # Sequences that compute parts of their prompts, by row, for prompt logprobs.
    by_row: dict[int, Sequence]
    # What the step computes, and the clock when it was scheduled; None if nobody wants to know how long steps take.
    work: StepWork | None = None
    scheduled_at: float = 0.0


class Step:
    """A plan in the making: passes over the state, each of which schedules some sequences.

    chunk_budget: cuts chunks of prompts beside decodes.
    """

    def __init__(self, state: SchedulerState, chunk_budget: ChunkBudget | None):
        self.state, self.memory, self._chunk_budget = state, state.memory, chunk_budget
        self._chunks: StepChunks | None = None  # how much of prompts the decodes can bear; None for any amount
        self._budget = state.max_num_batched_tokens  # tokens that may still be scheduled
        # Forks that may enter now; those that this step makes enter in the next one.
        self._forks, state.forks = state.forks, []
        self.started: list[SequenceGroup] = []  # requests admitted for the first time
        self.decodes: list[Sequence] = []  # compute one token and sample
        # With token counts: sequences whose prompt ends in this step and that sample, and other chunks of prompts.
        self.ending: list[tuple[Sequence, int]] = []
        self.partial: list[tuple[Sequence, int]] = []
        self._pooled: list[Sequence] = []  # those of `partial` that end in this step, with an embedding
        self._masks: list[tuple[Sequence, bytes]] = []  # of the constrained sequences that sample
        # As `StepPlan` has them.
        self._new: list[SequenceData] = []
        self._block_updates: list[tuple[int, int, list[list[int]]]] = []
        self._copies: list[tuple[int, int]] = []
        self._await_swap_ins = False
        # Adapters whose sequences cannot enter in this step, or have to let one enter first that waits for a slot.
        self._no_slot: set[int] = set()
        self._yielding: set[int] = set()
        # Sequences that entered, but whose blocks are filled while the step computes.
        self._arriving: list[Sequence] = []
        # Sequences whose full blocks later steps may use, but not this one.
        self._filling: list[Sequence] = []

    @property
    def is_empty(self) -> bool:
        """True while nothing is to be computed."""
        return not (self.decodes or self.ending or self.partial)

    # ---------------------------------------------------------------------------------------------- the batch

    def advance(self) -> None:
        """Schedule what runs: one more token for every sequence that decodes, then chunks of the others' prompts.

        Sequences come in policy order, and preemption takes them from the end, which ends the loop early. This loop
        runs over all running sequences in every step: it is written for speed.
        """
        prefilling: list[Sequence] = []
        budget, add = self._budget, self.decodes.append
        for seq in self.state.running:
            computed = seq.num_computed
            if computed >= seq.steady_computed or not budget:
                if not seq.decoding:
                    if computed >= seq.capacity and not self._grow(seq):
                        break  # as below; only where a sliding window lets a prompt begin without all of its blocks
                    prefilling.append(seq)
                    continue
                if seq.closed or computed + 1 >= seq.max_len:
                    continue  # its next mask or token is not known, or a step in flight samples its last token
                if not budget:
                    break
                if computed >= seq.capacity and not self._grow(seq):
                    break  # the last in order, it was preempted itself
                if seq.gate is not None:
                    self._close(seq, seq.gate)
                else:
                    seq.steady_computed = min(seq.capacity, seq.max_len - 1)
            budget -= 1
            seq.num_computed = computed + 1
            seq.num_pending += 1
            add(seq)
        self._budget = budget
        if self._chunk_budget is not None and self.decodes:
            self._chunks = StepChunks(self._chunk_budget, len(self.decodes))
        for seq in prefilling:
            if self._budget and seq.status is RUNNING:  # a decode may have preempted it
                self._compute(seq)

    def _grow(self, seq: Sequence) -> bool:
        """Give each table of a sequence one more block, preempting from the end. False if it had to go itself."""
        memory = self.memory
        memory.drop_behind(seq)
        while memory.gpu.num_free < memory.num_groups:
            if self._forks:
                self.state.send_back(self._forks.pop())
            elif self.state.preempt_last() is seq:
                return False
        index = seq.capacity // memory.block_size
        self._block_updates.append((seq.row, index, memory.extend_tables(seq, 1)))
        return True

    def _compute(self, seq: Sequence) -> None:
        """Compute the next tokens of a sequence that isn't decoding; all its ids are known, blocks for one are there.

        With the last of them its siblings fork off. A sibling computes the prompt's last token once more, in its own
        copy of the last block, and samples from it with its own noise: to the workers it is like any other sequence. A
        recurrent state must not have seen that token, so then they fork off before it, and it is a step of its own.
        """
        uncomputed = len(seq.token_ids) - seq.num_computed
        count = min(self._budget, uncomputed)
        if seq.group.siblings and self.memory.recurrent and uncomputed > 1:
            count = min(count, uncomputed - 1)
        if self._chunks is not None and uncomputed > 1:  # a single token is as a decode
            count = self._chunks.grant(seq.num_computed, count)
            if not count:
                self._budget = 0  # time is up for this step
                return
        if seq.num_computed + count > seq.capacity:
            count = self._find_blocks(seq, count)
        self._budget -= count
        seq.num_computed += count
        if seq.next_full <= seq.num_computed:
            if self.memory.recurrent:
                self._filling.append(seq)
            else:
                self.memory.register(seq, seq.num_computed)
        if seq.group.siblings and uncomputed - count <= self.memory.recurrent:
            self._fork_siblings(seq)
        if count < uncomputed:
            self.partial.append((seq, count))
            return
        seq.decoding = True
        seq.num_pending += 1
        if seq.group.request.pooling is not None:
            self.partial.append((seq, count))
            self._pooled.append(seq)
            return
        if count == 1:
            self.decodes.append(seq)
        else:
            self.ending.append((seq, count))
        if seq.gate is not None:
            self._close(seq, seq.gate)

    def _fork_siblings(self, seq: Sequence) -> None:
        """Let the siblings of a sequence hold the blocks of its prompt, or of all but the last token of it."""
        siblings, seq.group.siblings = seq.group.siblings, []
        for sibling in siblings:
            self.state.fork(sibling, seq, len(seq.group.request.prompt_token_ids) - self.memory.recurrent)

    def _find_blocks(self, seq: Sequence, count: int) -> int:
        """Make the sequence's tables reach over its next `count` tokens; for how many of them there are blocks.

        Only with a sliding window: otherwise a prompt has all of its blocks from its admission on.
        """
        memory = self.memory
        memory.drop_behind(seq)
        begin = seq.capacity // memory.block_size
        room = memory.gpu.num_free // memory.num_groups
        missing = min(memory.gpu.blocks_for(seq.num_computed + count) - begin, room)
        if missing:
            self._block_updates.append((seq.row, begin, memory.extend_tables(seq, missing)))
        return min(count, seq.capacity - seq.num_computed)

    def _close(self, seq: Sequence, gate: Gate) -> None:
        """Note that a gated sequence samples in this step: its mask goes along, and its next token is awaited."""
        assert not gate.closed, f"sampled with a closed gate: {seq}"
        gate.closed = True
        if gate.constraint is not None:
            mask = gate.constraint.mask()
            assert mask is not None, f"sampled without a mask: {seq}"
            self._masks.append((seq, mask))

    # ---------------------------------------------------------------------------------------------- admission

    def admit_forks(self) -> None:
        """Let forked siblings enter; those that don't fit give their blocks back and wait like new sequences."""
        memory = self.memory
        for seq in self._forks:
            room = memory.gpu.num_free - memory.num_groups
            if not (self._budget and self.state.free_rows and self._fits(seq, room)):
                self.state.send_back(seq)
                continue
            last = len(seq.token_ids) - 1
            self._copies += memory.make_writable(seq, last)
            self._enter(seq, last)
            self._compute(seq)

    def admit(self) -> None:
        """Admit waiting sequences in policy order, up to the first for which anything is short: nobody overtakes it.

        In that order whoever ran before comes before whoever is new. Only whoever lacks nothing but a slot for its
        adapter is overtaken: see `_may_hold_slot`.
        """
        memory = self.memory
        self._no_slot, self._yielding = set(), set()
        while self._budget and self.state.free_rows and (seq := self._head()) is not None:
            match = memory.match(seq)
            if not self._has_room(seq, match):
                return
            self.state.waiting.discard(seq)
            self._count(seq, match)
            num_computed = match.end * memory.block_size
            # With a sliding window the first blocks suffice: chunks find the others as they come.
            arriving = memory.claim(seq, match, num_computed + 1 if memory.forgets else len(seq.token_ids))
            self._enter(seq, num_computed)
            if arriving:
                self._arriving.append(seq)  # its blocks arrive while this step computes
            else:
                self._compute(seq)

    def yield_to_urgent(self) -> None:
        """Preempt sequences of lower priority while one of higher priority waits for a row or for blocks."""
        head, running = self._head(), self.state.running
        if head is None:
            return
        match = self.memory.match(head)
        while running and head.key[0] < running[-1].key[0]:
            if self.state.free_rows and self._has_room(head, match):
                return
            self.state.preempt_last()

    def make_way(self) -> None:
        """Let the first in order in at the cost of the last that run; called if all that run await a group's choice."""
        while self.is_empty and not self._arriving and self.state.running and self.state.waiting:
            if self._head() is None and not self._no_slot:
                return
            self.state.preempt_last()
            self.admit()

    def await_arriving(self) -> None:
        """If there is nothing else to do while blocks arrive, compute who waits for them at once, behind the blocks."""
        if self._arriving and self.is_empty:
            self._await_swap_ins = True
            for seq in self._arriving:
                if self._budget:
                    self._compute(seq)

    def _head(self) -> Sequence | None:
        """The first in policy order outside the batch. None also while something about it is not known yet.

        Those that would have to wait for a slot for their adapter are passed over.
        """
        waiting, alone = self.state.waiting, self.state.alone
        candidates: Iterator[Sequence] = (seq for seq in waiting if alone in (None, seq.request_id))
        if self.state.adapters.num_slots:
            candidates = filter(self._may_hold_slot, candidates)
        head = next(candidates, None)
        # Preempted while its last token is in flight: the id is needed first, and then its mask.
        return None if head is None or head.num_pending or head.closed else head

    def _may_hold_slot(self, seq: Sequence) -> bool:
        """Whether a waiting sequence can enter as far as its adapter is concerned. Asked in policy order.

        One that finds no slot free makes the adapter yield with which no request began for longest, the next one the
        second, and so on: no new request behind it enters with such an adapter, so that the slot becomes free when
        those that have it end. So nobody waits for ever, and requests whose adapters are there do not wait for it.
        """
        adapter, adapters = seq.group.adapter, self.state.adapters
        if adapter is None:
            return True
        if adapters.is_resident(adapter) and (adapter not in self._yielding or seq.group.num_cached_tokens is not None):
            return True
        if adapter in self._no_slot or adapter in self._yielding:
            return False
        if adapters.can_hold(adapter):
            return True
        self._no_slot.add(adapter)
        if adapter in adapters.loaded:
            self._yielding.update(itertools.islice((a for a in adapters.least_recent() if a not in self._yielding), 1))
        return False

    def _has_room(self, seq: Sequence, match: Match) -> bool:
        """Whether the sequence's blocks can be allocated once those of the match are held."""
        room = self.memory.num_free_after(match) - self._missing(seq, match)
        return self._fits(seq, room - self._promised() if self.memory.forgets else room)

    def _missing(self, seq: Sequence, match: Match) -> int:
        """Blocks beyond the match that it has to find at first, or until it decodes if its chunks find them.

        The latter are those of the windows and the longest chunk; the only sequence gets along with less.
        """
        memory, blocks_for = self.memory, self.memory.gpu.blocks_for
        if not memory.forgets or not self.state.running:
            end = match.end * memory.block_size + 1 if memory.forgets else len(seq.token_ids)
            return memory.num_groups * max(0, blocks_for(end) - match.end)
        held = [len(blocks) for blocks in match.blocks]
        return self._missing_until_decode(seq, match.end, held, blocks_for(self.state.max_num_batched_tokens))

    def _missing_until_decode(self, seq: Sequence, end: int, held: list[int], chunk: int) -> int:
        """Blocks that a sequence whose tables reach up to block `end` lacks until it decodes.

        held: those that it has, by group. chunk: blocks that each group has beside a window.
        """
        missing = max(0, self.memory.gpu.blocks_for(len(seq.token_ids)) - end)
        total = 0
        for window, count in zip(self.memory.windows, held, strict=True):
            if window.tokens is None:
                total += missing
            else:
                most = window.most_blocks(len(seq.token_ids)) + chunk
                total += min(missing, max(1 if chunk else 0, most - count))
        return total

    def _promised(self) -> int:
        """Blocks that the running sequences still have to find for their prompts."""
        size = self.memory.block_size
        return sum(
            self._missing_until_decode(seq, seq.capacity // size, [len(table) for table in seq.block_tables], 0)
            for seq in self.state.running
            if not seq.decoding
        )

    def _fits(self, seq: Sequence, num_free: int) -> bool:
        """Whether a sequence may enter that leaves num_free blocks free.

        The only sequence may take all of them; it could otherwise wait for ever. A more urgent one need not care for
        those that it may preempt, nor a beam of a search that has begun: it takes the place of one that died, or its
        group waits for it alone.
        """
        running, growth = self.state.running, self.state.growth_blocks * self.memory.num_groups
        if not running:
            return num_free >= 0
        if num_free < int(self.memory.gpu.num_blocks * WATERMARK):
            return False
        urgent = self.state.preemptive and seq.key[0] < running[-1].key[0]
        if urgent or (seq.group.search is not None and seq.group.search.started):
            return True
        if num_free >= growth * len(running):
            return True
        return num_free >= growth * sum(each.capacity < each.max_len - 1 for each in running)

    def _count(self, seq: Sequence, match: Match) -> None:
        """Record what the prefix cache found for a waiting sequence, and when its request was first admitted."""
        counters, size = self.state.counters, self.memory.block_size
        if self.memory.caching and self.memory.looks_up(seq) and not seq.pinned:
            far = match.num_far * size
            counters.prefix_cache_queries += len(seq.token_ids)
            counters.prefix_cache_hits += match.end * size
            if self.memory.tiered:
                counters.cpu_prefix_cache_queries += len(seq.token_ids) - match.end * size + far
                counters.cpu_prefix_cache_hits += far
        if seq.group.num_cached_tokens is None:
            seq.group.num_cached_tokens = match.end * size
            seq.group.started_at = self.state.clock()
            self.started.append(seq.group)
            if seq.group.adapter is not None:
                self.state.adapters.renew(seq.group.adapter)

    def _enter(self, seq: Sequence, num_computed: int) -> None:
        """Put a sequence that has blocks into the batch; nothing of it is scheduled yet."""
        size, request = self.memory.block_size, seq.group.request
        self.state.enter(seq)
        seq.num_computed = num_computed
        seq.num_registered = num_computed // size
        if self.memory.caching:
            seq.next_full = (seq.num_registered + 1) * size
        self._new.append(
            SequenceData(
                row=seq.row,
                token_ids=list(seq.token_ids),
                num_prompt_tokens=len(request.prompt_token_ids),
                num_computed_tokens=num_computed,
                block_tables=[list(table) for table in seq.block_tables],
                params=request.params,
                seed=seq.seed,
                pooling=request.pooling,
                first_blocks=list(seq.first_blocks),
                adapter_slot=seq.adapter_slot,
            )
        )

    # ---------------------------------------------------------------------------------------------- the plan

    def finish(self, step_id: int) -> tuple[StepPlan, InFlight]:
        """The plan, which computes something, and its record."""
        state, counters = self.state, self.state.counters
        sampled = self.decodes + [seq for seq, _count in self.ending]
        prefills = self.ending + self.partial
        num_tokens = [1] * len(self.decodes) + [count for _seq, count in prefills]
        computed = sum(num_tokens)
        for seq in self._filling:
            self.memory.register(seq, seq.num_computed)
        # Sources of copies are held until now: another copy's destination could otherwise be one of them.
        self.memory.gpu.release([source for source, _destination in self._copies])
        place = {id(seq): i for i, seq in enumerate(sampled)} if self._masks else {}
        plan = StepPlan(
            step_id=step_id,
            free_rows=state.left_rows,
            new=self._new,
            block_updates=self._block_updates,
            copies=self._copies,
            rows=[seq.row for seq in sampled] + [seq.row for seq, _count in self.partial],
            num_tokens=num_tokens,
            num_decodes=len(self.decodes),
            num_sampled=len(sampled),
            masks=[(place[id(seq)], mask) for seq, mask in self._masks],
            await_swap_ins=self._await_swap_ins,
            tokens=list(state.chosen_tokens.items()),
            adapters=state.adapters.puts,
            dropped_adapters=state.adapters.drops,
            **self.memory.take_moves(step_id, computed)._asdict(),
        )
        state.adapters.puts, state.adapters.drops = [], []
        state.left_rows, state.chosen_tokens = [], {}
        counters.num_steps += 1
        counters.step_tokens[bisect.bisect_left(STEP_TOKEN_BUCKETS, computed)] += 1
        counters.computed_tokens += computed
        record = InFlight(step_id, sampled, self._pooled, {seq.row: seq for seq, _count in prefills})
        if self._chunk_budget is not None:
            record.work = self._chunk_budget.work_of(len(self.decodes), prefills)
            record.scheduled_at = state.clock()
        return plan, record


class Scheduler:
    """Queues, batch rows and blocks of one engine. Not thread-safe; knows neither torch nor Ray.

    state: empty; the scheduler and its policies are the only ones to change it from now on.
    policy: a request's place in the order.
    chunk_budget: cuts chunks of prompts for a target inter-token latency; None for chunks as long as the token budget.
    """

    def __init__(self, state: SchedulerState, *, policy: Policy, chunk_budget: ChunkBudget | None = None):
        self.state = state
        self.in_flight: list[InFlight] = []  # plans without results, oldest first
        # What fronts are told of the last `schedule`: starts of requests that report them, failures of constraints, and
        # who runs alone.
        self.new_deltas: list[TokenDelta] = []
        self.chunk_budget = chunk_budget
        self._policy = policy
        self._arrivals = itertools.count()
        self._step_ids = itertools.count()
        self._suspects = Suspects()

    def add(
        self, request: GenerationRequest, constrain: MakeConstraint | None = None, adapter: int | None = None
    ) -> None:
        """Queue a request that fits the engine's limits and whose id is not in use.

        constrain: makes each completion's constraint, whose first mask is known, if the tokens are to be constrained.
        adapter: the id of its adapter, if it has one.
        """
        state, params, prompt = self.state, request.params, len(request.prompt_token_ids)
        arrival = next(self._arrivals)
        max_len = state.max_model_len if params.max_tokens is None else prompt + params.max_tokens
        group = SequenceGroup(
            request,
            state.memory.root_hash(request.cache_salt, adapter),
            min(max_len, state.max_model_len) if request.pooling is None else prompt + 1,
            frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else state.eos_token_ids),
            prompt_logprobs=None if params.prompt_logprobs is None else [None] * prompt,
            search=BeamSearch() if params.use_beam_search else None,
            adapter=adapter,
            added_at=state.clock(),
        )
        key, indices = (*self._policy(request), arrival), [0] if params.use_beam_search else request.live_indices
        group.sequences = [Sequence(group, index, (*key, index)) for index in indices]
        for seq in group.sequences:
            if params.use_beam_search:
                seq.gate = Gate(beam=Beam())
            elif constrain is not None:
                seq.gate = Gate(constraint=constrain())
        state.groups[request.request_id] = group
        state.counters.prompt_tokens += prompt
        if request.num_deaths:
            self._suspects.add(request.request_id, request.num_deaths)
        if request.emitted is not None:
            self._go_on(group, request.emitted)
            return
        group.siblings = group.sequences[1:]
        state.waiting.add(group.sequences[0])

    def _go_on(self, group: SequenceGroup, emitted: Mapping[int, list[int]]) -> None:
        """Queue a request where another engine left it: each sequence computes its own tokens again."""
        group.fresh, group.prompt_logprobs = False, None
        for seq in group.sequences:
            tokens = emitted[seq.index]
            seq.token_ids += tokens
            if tokens and seq.gate is not None and seq.gate.constraint is not None:
                seq.gate.constraint.accept(*tokens)
                seq.gate.closed = True
                self.state.awaiting_mask.append(seq)
            self.state.waiting.add(seq)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one of its samples, at once, whatever state it is in; unknown ones are ignored."""
        group = self.state.groups.get(request_id)
        if group is None or (index is not None and group.search is not None):
            return
        ended = [seq for seq in group.sequences if index in (None, seq.index)]
        group.sequences = [seq for seq in group.sequences if seq not in ended]
        group.siblings = [seq for seq in group.siblings if seq not in ended]
        for seq in ended:
            self.state.retire(seq)
        if group.siblings and group.siblings[0] is group.sequences[0]:  # who computed the prompt for them is gone
            self.state.waiting.add(group.siblings.pop(0))

    def has_work(self) -> bool:
        """True while any request lives or any step is in flight."""
        return bool(self.state.groups or self.in_flight)

    def schedule(self) -> StepPlan | None:
        """The next step's plan, or None if nothing can run before a step in flight is done or a mask is known.

        A sequence whose constraint failed ends here. See `new_deltas`.
        """
        state = self.state
        self.new_deltas = self._open_gates() if state.awaiting_mask else []
        if self._suspects or state.alone is not None:
            self._isolate()
        if state.alone is not None and any(seq.request_id != state.alone for seq in self._computing()):
            return None
        step = Step(state, self.chunk_budget)
        if state.preemptive:
            step.yield_to_urgent()
        step.advance()
        step.admit_forks()
        step.admit()
        if step.is_empty and not self.in_flight and not state.awaiting_mask:
            step.make_way()
        step.await_arriving()
        self.new_deltas += [
            TokenDelta(group.request.request_id, 0, []) for group in step.started if group.request.report_start
        ]
        if step.is_empty:
            return None
        plan, record = step.finish(next(self._step_ids))
        self.in_flight.append(record)
        return plan

    def restart(self, seconds: float) -> list[TokenDelta]:
        """Begin anew, with new workers, after the loss of all that the old ones held, plans in flight included.

        Running sequences wait again, with the tokens that are known. Who was in these plans may have been the cause:
        see `Suspects`. Returns the last deltas of requests that are taken for it. seconds: that there were no workers.
        """
        lost = {seq.request_id for seq in self._computing()} & self.state.groups.keys()
        self.in_flight = []
        self.state.clear()
        for group in self.state.groups.values():
            group.num_recoveries += group.num_cached_tokens is not None
        self.state.counters.num_recoveries += 1
        self.state.counters.recovery_seconds += seconds
        deltas: list[TokenDelta] = []
        reason = f"the workers died {FATAL_DEATHS} times while they computed this request, the last time it alone"
        for request_id in self._suspects.died(lost):
            group = self.state.groups[request_id]
            live = [seq for seq in group.sequences if seq.status is not FINISHED]
            of_search = range(group.request.params.num_completions)
            for index in of_search if group.search is not None else [seq.index for seq in live]:
                deltas.append(TokenDelta(request_id, index, [], finish_reason="error", stop_reason=reason))
            for seq in live:
                self.state.retire(seq)
        return deltas

    def _computing(self) -> list[Sequence]:
        """The sequences of plans in flight."""
        return [seq for step in self.in_flight for seq in (*step.sampled, *step.pooled, *step.by_row.values())]

    def _isolate(self) -> None:
        """Let the next suspect run alone that is to, or all requests again."""
        state = self.state
        alone = self._suspects.next_alone(state.groups)
        if alone is not None and alone != state.alone:
            while state.forks:
                state.send_back(state.forks.pop())
            while state.running:
                state.preempt_last()
            self.new_deltas.append(TokenDelta(alone, state.groups[alone].sequences[0].index, [], alone=True))
        state.alone = alone

    def _open_gates(self) -> list[TokenDelta]:
        """Let constrained sequences go on whose next mask has become known; end those whose constraint failed.

        Returns the last deltas of the latter.
        """
        state, failed = self.state, []
        awaiting, state.awaiting_mask = state.awaiting_mask, []
        for seq in awaiting:
            if seq.status is FINISHED:
                continue
            assert seq.gate is not None and seq.gate.constraint is not None
            if (error := seq.gate.constraint.error()) is not None:
                state.retire(seq)
                reason, param = str(error), error.param
                failed.append(
                    TokenDelta(
                        seq.request_id, seq.index, [], finish_reason="error", stop_reason=reason, bad_param=param
                    )
                )
            elif seq.gate.constraint.mask() is None:
                state.awaiting_mask.append(seq)
            else:
                seq.gate.closed = False
        return failed

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
        deltas: list[TokenDelta] = []
        for seq, embedding in zip(step.pooled, result.embeddings, strict=True):
            seq.num_pending -= 1
            if seq.status is not FINISHED:  # aborted
                self.state.retire(seq)
                deltas.append(self._delta(seq, [], None, "stop", embedding=embedding))
        if self._suspects:
            self._suspects.got_results(seq.request_id for seq in (*step.sampled, *step.pooled))
        num_others, counters = len(deltas), self.state.counters
        due = self._take_tokens(step.sampled, result, deltas)
        counters.generation_tokens += len(deltas) - num_others
        for group in due:
            first = group.sequences[0]
            if group.fresh:  # says that the prompt of a search is done; tokens come when the search is over
                deltas.append(self._delta(first, [], None if group.request.params.logprobs is None else []))
            results = beam.advance(self.state, group)
            counters.generation_tokens += sum(len(delta.token_ids) for delta in results)
            deltas += results
        return deltas

    def _take_tokens(
        self, sampled: list[Sequence], result: StepResult, deltas: list[TokenDelta]
    ) -> list[SequenceGroup]:
        """Append the sampled tokens to their sequences, and what fronts are told of them to `deltas`.

        Returns the beam searches that are to make their choice. This loop runs over all running sequences in every
        step: it is written for speed.
        """
        state, logprobs = self.state, result.logprobs
        register, add = state.memory.register, deltas.append
        due: list[SequenceGroup] = []
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
                if beam.take(state, seq, gate.beam, entry):
                    due.append(seq.group)
                continue
            token_ids.append(token)
            if length > seq.next_full:
                register(seq, length - 1)
            reason, stop = None, None
            if token in seq.stop_ids:
                reason, stop = "stop", token if token in seq.group.request.params.stop_token_ids else None
            elif length >= seq.max_len:
                reason = "length"
            add(self._delta(seq, [token], None if entry is None else [entry], reason, stop))
            if reason is not None:
                state.retire(seq)
            elif gate is not None and gate.constraint is not None:
                gate.constraint.accept(token)
                state.awaiting_mask.append(seq)
            elif seq.status is RUNNING:
                seq.steady_known = min(seq.next_full, seq.max_len - 1)
        return due

    def _delta(
        self,
        seq: Sequence,
        token_ids: list[int],
        logprobs: list[TokenLogprobs] | None,
        reason: str | None = None,
        stop: int | None = None,
        embedding: bytes | None = None,
    ) -> TokenDelta:
        """What is new of a sequence. Its request's first delta has what is known of the request by then."""
        group, cached, prompt_logprobs, times = seq.group, 0, None, None
        if group.fresh:
            group.fresh, cached = False, group.num_cached_tokens or 0
            prompt_logprobs, times = group.prompt_logprobs, self.state.times(group)
        return TokenDelta(
            seq.request_id,
            seq.index,
            token_ids,
            logprobs,
            reason,
            stop,
            cached,
            prompt_logprobs,
            times,
            num_preemptions=group.num_preemptions,
            num_recoveries=group.num_recoveries,
            embedding=embedding,
        )

    def stats(self) -> EngineStats:
        """A snapshot of queues, pools and counters."""
        state, memory = self.state, self.state.memory
        waiting = len(state.waiting)
        if memory.num_swapped:  # of which beams that await their group's choice are in no queue
            waiting -= sum(bool(seq.pinned) for seq in state.waiting)
        return EngineStats(
            num_running=len(state.running),
            num_waiting=waiting + len(state.forks),
            num_swapped=memory.num_swapped,
            num_used_blocks=memory.gpu.num_blocks - memory.gpu.num_free,
            num_total_blocks=memory.gpu.num_blocks,
            num_used_cpu_blocks=memory.cpu.num_blocks - memory.cpu.num_free,
            num_cached_cpu_blocks=len(memory.cpu.cache),
            num_total_cpu_blocks=memory.cpu.num_blocks,
            swapped_out_blocks=memory.num_swapped_out,
            swapped_in_blocks=memory.num_swapped_in,
            prefill_chunk_limit=0 if self.chunk_budget is None else self.chunk_budget.limit,
            **asdict(state.counters) | {"step_tokens": state.counters.step_tokens.copy()},
        )
