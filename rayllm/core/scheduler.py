"""`Scheduler`: decides, step by step, which sequences compute how many tokens in which blocks.

One mixed batch a step under a token budget: decodes first, then prompts already being computed (in chunks), then
forked siblings, then sequences that wait. A step's plan may be made while earlier ones still run: sequences advance
when they are *scheduled*, and the ids of tokens sampled in flight are filled in by `update`. Freed blocks may be handed
out at once, because workers execute plans in order.

All prompt blocks are allocated on admission, so only decoding sequences ever run out of blocks; then the last sequence
in policy order is preempted (its blocks are freed, and it waits to be recomputed), until the first in order alone
remains, which always fits. Hence every sequence finishes.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable

from rayllm.core.block_manager import BlockManager
from rayllm.core.constraint import AwaitedMasks, MakeConstraint
from rayllm.core.integrity import check_scheduler
from rayllm.core.policy import POLICIES
from rayllm.core.prefix_cache import PrefixCache
from rayllm.core.queue import WaitingQueue
from rayllm.core.sequence import Sequence, SequenceGroup, SequenceStatus, derive_seed, policy_order
from rayllm.core.step import Draft, InFlight
from rayllm.types import (
    STEP_TOKEN_BUCKETS,
    EngineStats,
    GenerationRequest,
    RequestTimes,
    SequenceData,
    StepPlan,
    StepResult,
    TokenDelta,
)

WATERMARK = 0.01  # share of blocks kept free at admission, so that running sequences can grow a while
WAITING, RUNNING = SequenceStatus.WAITING, SequenceStatus.RUNNING
FORKED, FINISHED = SequenceStatus.FORKED, SequenceStatus.FINISHED


class Scheduler:
    """Queues, batch rows and blocks of one engine. Not thread-safe; knows neither torch nor Ray.

    clock: seconds, for the times that requests report; nothing is decided by it.
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
        clock: Callable[[], float] = lambda: 0.0,
    ):
        if max_model_len > num_blocks * block_size:
            raise ValueError(
                f"max_model_len {max_model_len} exceeds the pool of {num_blocks} blocks of {block_size} tokens"
            )
        self.cache = PrefixCache(block_size)
        self.caching = enable_prefix_caching
        self.blocks = BlockManager(num_blocks, block_size, self.cache if enable_prefix_caching else None)
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.eos_token_ids = frozenset(eos_token_ids)
        self.policy = POLICIES[policy]
        self.preemptive = policy == "priority"
        self.watermark = int(num_blocks * WATERMARK)
        self.seed = seed
        self.groups: dict[str, SequenceGroup] = {}
        self.waiting = WaitingQueue()
        self.swapped = WaitingQueue()  # filled once preemption can swap; scheduled between chunks and waiting
        self.running: list[Sequence] = []  # in policy order
        self.forks: list[Sequence] = []
        self.in_flight: list[InFlight] = []
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._rows_to_free: list[int] = []
        self.awaited_masks = AwaitedMasks()
        self._failed: list[TokenDelta] = []  # last deltas of sequences whose constraint failed
        self._arrivals = itertools.count()
        self._step_ids = itertools.count()
        self._num_preemptions = self._num_steps = 0
        self._prompt_tokens = self._generation_tokens = 0
        self._cache_queries = self._cache_hits = 0
        self._clock = clock
        self._step_tokens = [0] * (len(STEP_TOKEN_BUCKETS) + 1)
        self._computed_tokens = 0
        self.to_report: list[str] = []  # requests with report_start that the last `schedule` started

    # ---------------------------------------------------------------------------------------------- requests

    def add(self, request: GenerationRequest, constrain: MakeConstraint | None = None) -> None:
        """Queue a valid request. Raises ValueError if its id is in use or its prompt can never fit.

        constrain: makes each completion's constraint, if the tokens are to be constrained.
        """
        prompt, params = request.prompt_token_ids, request.params
        if request.request_id in self.groups:
            raise ValueError(f"request id {request.request_id!r} is in use")
        if not 0 < len(prompt) < self.max_model_len:
            raise ValueError(f"a prompt has 1 to {self.max_model_len - 1} tokens, not {len(prompt)}")
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
        self._prompt_tokens += len(prompt)
        self.waiting.push(group.sequences[0])

    def abort(self, request_id: str) -> None:
        """End a request at once, whatever state it is in; unknown ids are ignored."""
        self._failed = [delta for delta in self._failed if delta.request_id != request_id]
        group = self.groups.pop(request_id, None)
        if group is None:
            return
        for seq in group.sequences:
            self._retire(seq)
        self._drop_finished()

    def has_work(self) -> bool:
        """True while any request lives or any step is in flight."""
        return bool(self.groups or self.in_flight)

    def stats(self) -> EngineStats:
        """A snapshot of queues, pool and counters."""
        return EngineStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting) + len(self.forks),
            num_swapped=len(self.swapped),
            num_used_blocks=self.blocks.num_blocks - self.blocks.num_free,
            num_total_blocks=self.blocks.num_blocks,
            num_preemptions=self._num_preemptions,
            num_steps=self._num_steps,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            prefix_cache_queries=self._cache_queries,
            prefix_cache_hits=self._cache_hits,
            step_tokens=self._step_tokens.copy(),
            computed_tokens=self._computed_tokens,
        )

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
            self._yield_to_urgent()
        prefilling = self._schedule_decodes(draft)
        for seq in prefilling:
            if draft.budget and seq.status is RUNNING:  # a decode may have preempted it
                self._schedule_chunk(seq, draft)
        self._admit_forks(draft)
        self._admit_waiting(draft)
        self.blocks.release(draft.copied)
        self.forks = draft.forked
        if not (draft.decodes or draft.ending or draft.partial):
            return None
        plan, record = draft.finish(next(self._step_ids), self._rows_to_free)
        self._rows_to_free = []
        self._num_steps += 1
        computed = self.max_num_batched_tokens - draft.budget
        self._step_tokens[bisect.bisect_left(STEP_TOKEN_BUCKETS, computed)] += 1
        self._computed_tokens += computed
        self.in_flight.append(record)
        return plan

    def update(self, result: StepResult) -> list[TokenDelta]:
        """Take in the result of the oldest plan in flight: append tokens, end sequences, report what is new."""
        step = self.in_flight.pop(0)
        if step.step_id != result.step_id or len(step.sampled) != len(result.token_ids):
            raise RuntimeError(f"result of step {result.step_id} does not belong to step {step.step_id}")
        for row, position, entries in result.prompt_logprobs:
            prompt_logprobs = step.by_row[row].group.prompt_logprobs
            if prompt_logprobs is not None:
                prompt_logprobs[position : position + len(entries)] = entries
        logprobs = result.logprobs
        deltas = self.take_failed()
        num_failed = len(deltas)
        any_finished = False
        for i, (seq, token) in enumerate(zip(step.sampled, result.token_ids, strict=True)):
            seq.num_pending -= 1
            if seq.status is FINISHED:
                continue  # aborted, or found finished while this step was in flight: the token is dropped
            token_ids = seq.token_ids
            token_ids.append(token)
            length = len(token_ids)
            if length > seq.next_full:
                self._register(seq, length - 1)
            if seq.fresh or logprobs is not None or length >= seq.max_len or token in seq.stop_ids:
                entry = logprobs[i] if logprobs is not None else None
                delta = self._delta(seq, token, None if entry is None else [entry])
                any_finished |= delta.finish_reason is not None
                deltas.append(delta)
            else:
                deltas.append(TokenDelta(seq.request_id, seq.index, [token]))
            if seq.constraint is not None and seq.status is not FINISHED:
                self.awaited_masks.add(seq, token)
        self._generation_tokens += len(deltas) - num_failed
        if any_finished:
            self._drop_finished()
        return deltas

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
            self._drop_finished()

    def _delta(self, seq: Sequence, token: int, logprobs: list | None) -> TokenDelta:
        """The delta of a first, last or logprobs-carrying token; retires the sequence if it is the last."""
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
                prompt_logprobs = group.prompt_logprobs
                times = RequestTimes(group.started_at - group.added_at, self._clock() - group.started_at)
        if reason is not None:
            self._retire(seq)
            if group.finished:
                del self.groups[seq.request_id]
        return TokenDelta(seq.request_id, seq.index, [token], logprobs, reason, stop, cached, prompt_logprobs, times)

    # ---------------------------------------------------------------------------------------------- the passes

    def _schedule_decodes(self, draft: Draft) -> list[Sequence]:
        """Advance every decoding sequence by one token. Returns the running ones that are still in their prompt.

        This loop runs over all running sequences in every step: it is written for speed.
        """
        prefilling: list[Sequence] = []
        decodes, running, budget = draft.decodes, self.running, draft.budget
        for seq in running:  # preemption shortens the list from its end, which ends the loop early
            if not seq.decoding:
                prefilling.append(seq)
                continue
            computed = seq.num_computed
            if seq.blocked or computed + 1 >= seq.max_len:
                continue  # its next mask is not known, or a step in flight samples its last token
            if not budget:
                break
            if computed >= seq.capacity and not self._grow(seq, draft):
                break  # the last in order, it was preempted itself
            if seq.constraint is not None:
                draft.constrain(seq)
            budget -= 1
            seq.num_computed = computed + 1
            seq.num_pending += 1
            decodes.append(seq)
        draft.budget = budget
        return prefilling

    def _grow(self, seq: Sequence, draft: Draft) -> bool:
        """Give a sequence one more block, preempting from the end of the order. False if it had to go itself."""
        while not self.blocks.num_free:
            if self.forks:
                self._send_back(self.forks.pop())
                continue
            if self._preempt_last() is seq:
                return False
        block = self.blocks.allocate(1)
        draft.block_updates.append((seq.row, len(seq.block_table), block))
        seq.block_table += block
        seq.capacity += self.blocks.block_size
        return True

    def _schedule_chunk(self, seq: Sequence, draft: Draft) -> None:
        """Compute the next tokens of a sequence that isn't decoding; all its ids are known and its blocks are there."""
        uncomputed = len(seq.token_ids) - seq.num_computed
        count = min(draft.budget, uncomputed)
        draft.budget -= count
        seq.num_computed += count
        if seq.next_full <= seq.num_computed:
            self._register(seq, seq.num_computed)
        if count < uncomputed:
            draft.partial.append((seq, count))
            return
        seq.decoding = True
        seq.num_pending += 1
        if count == 1:
            draft.decodes.append(seq)
        else:
            draft.ending.append((seq, count))
        if seq.constraint is not None:
            draft.constrain(seq)
        if seq.group.siblings:
            self._fork_siblings(seq, draft)

    def _fork_siblings(self, parent: Sequence, draft: Draft) -> None:
        """Let the rest of the group hold the prompt's blocks, to enter the batch in the next step.

        A sibling computes the prompt's last token once more, in its own copy of the last block, and samples
        from it with its own noise: to the workers a forked sequence is like any other.
        """
        group = parent.group
        prompt_blocks = self.blocks.blocks_for(len(group.prompt_token_ids))
        for seq in group.siblings:
            seq.status = FORKED
            seq.block_table = self.blocks.fork(parent.block_table[:prompt_blocks])
            draft.forked.append(seq)
        group.siblings = []

    def _admit_forks(self, draft: Draft) -> None:
        """Let forked siblings enter; those that don't fit give their blocks back and wait like new sequences."""
        for seq in self.forks:
            if not (draft.budget and self._free_rows and self.blocks.num_free > self._reserve()):
                self._send_back(seq)
                continue
            last = len(seq.group.prompt_token_ids) - 1
            copy = self.blocks.make_writable(seq.block_table, last // self.blocks.block_size)
            if copy is not None:
                draft.copies.append(copy)
                draft.copied.append(copy[0])
            self._enter(seq, seq.block_table, last, draft)

    def _admit_waiting(self, draft: Draft) -> None:
        """Admit waiting sequences in policy order, up to the first for which budget, rows or blocks are short."""
        while draft.budget and self._free_rows:
            seq = self.waiting.peek()
            # Preempted while its last token is in flight: the id is needed first, and then its mask.
            if seq is None or seq.num_pending or seq.blocked:
                return
            cached = self._match(seq)
            missing = self.blocks.blocks_for(len(seq.token_ids)) - len(cached)
            if not self._has_room(cached, missing):
                return
            self.waiting.remove(seq)
            self.blocks.acquire(cached)
            hit = len(cached) * self.blocks.block_size
            self._cache_queries += len(seq.token_ids)
            self._cache_hits += hit
            if seq.group.num_cached_tokens is None:
                seq.group.num_cached_tokens = hit
                seq.group.started_at = self._clock()
                if seq.group.report_start:
                    self.to_report.append(seq.request_id)
            self._enter(seq, cached + self.blocks.allocate(missing), hit, draft)

    def _yield_to_urgent(self) -> None:
        """Preempt sequences of lower priority while one of higher priority waits for a row or for blocks."""
        head = self.waiting.peek()
        if head is None or head.num_pending or head.blocked:
            return
        cached = self._match(head)
        missing = self.blocks.blocks_for(len(head.token_ids)) - len(cached)
        while self.running and head.key[0] < self.running[-1].key[0]:
            if self._free_rows and self._has_room(cached, missing):
                return
            self._preempt_last()

    # ---------------------------------------------------------------------------------------------- transitions

    def _enter(self, seq: Sequence, block_table: list[int], num_computed: int, draft: Draft) -> None:
        """Put a sequence into the batch and schedule its first chunk."""
        size = self.blocks.block_size
        seq.status = RUNNING
        seq.row = self._free_rows.pop()
        seq.block_table = block_table
        seq.capacity = len(block_table) * size
        seq.num_computed = num_computed
        seq.num_registered = num_computed // size
        if self.caching:
            seq.next_full = (seq.num_registered + 1) * size
        bisect.insort(self.running, seq, key=policy_order)
        draft.new.append(
            SequenceData(
                row=seq.row,
                token_ids=list(seq.token_ids),
                num_prompt_tokens=len(seq.group.prompt_token_ids),
                num_computed_tokens=num_computed,
                block_table=list(block_table),
                params=seq.group.params,
                seed=seq.seed,
            )
        )
        self._schedule_chunk(seq, draft)

    def _preempt_last(self) -> Sequence:
        """Take the last sequence in policy order out of the batch."""
        victim = self.running.pop()
        self._free_row(victim)
        self._send_back(victim)
        self._num_preemptions += 1
        return victim

    def _send_back(self, seq: Sequence) -> None:
        """Free a sequence's blocks and let it wait, to be computed again from its first token."""
        self.blocks.release(seq.block_table)
        seq.reset()
        seq.status = WAITING
        self.waiting.push(seq)

    def _retire(self, seq: Sequence) -> None:
        """End a sequence and free what it holds. If it runs, the caller drops it from the running list."""
        if seq.status is RUNNING:
            self._free_row(seq)
        elif seq.status is FORKED:
            self.forks.remove(seq)
        self.waiting.remove(seq)
        self.blocks.release(seq.block_table)
        seq.reset()
        seq.status = FINISHED

    def _free_row(self, seq: Sequence) -> None:
        self._rows_to_free.append(seq.row)
        self._free_rows.append(seq.row)
        seq.row = -1

    def _drop_finished(self) -> None:
        self.running = [seq for seq in self.running if seq.status is RUNNING]

    def _has_room(self, cached: list[int], missing: int) -> bool:
        """Whether `missing` blocks can be allocated once the `cached` ones are held."""
        return self.blocks.num_free_after(cached) - missing >= self._reserve()

    def _reserve(self) -> int:
        """Blocks that admission leaves free; none for the only sequence, which could otherwise wait for ever."""
        return self.watermark if self.running else 0

    def _match(self, seq: Sequence) -> list[int]:
        """Cached blocks of the sequence's beginning. At least its last token stays to be computed, for its logits."""
        group = seq.group
        if not self.caching or (group.params.prompt_logprobs is not None and seq.fresh and seq.index == 0):
            return []  # prompt logprobs need every prompt position computed
        usable = (len(seq.token_ids) - 1) // self.blocks.block_size
        self.cache.extend(seq.block_hashes, group.root_hash, seq.token_ids, usable)
        return self.cache.match(seq.block_hashes[:usable])

    def _register(self, seq: Sequence, num_tokens: int) -> None:
        """Make the full blocks among the first num_tokens tokens (ids known, KV written or scheduled) findable."""
        full = num_tokens // self.blocks.block_size
        self.cache.extend(seq.block_hashes, seq.group.root_hash, seq.token_ids, full)
        for i in range(seq.num_registered, full):
            self.cache.register(seq.block_hashes[i], seq.block_table[i])
        seq.num_registered = full
        seq.next_full = (full + 1) * self.blocks.block_size

    def check_integrity(self) -> None:
        """Raise AssertionError if any record contradicts another. Called by tests after every operation."""
        check_scheduler(self)
