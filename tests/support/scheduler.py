"""A scheduler, a worker that checks every KV read, and the loop between them that an engine would run."""

from __future__ import annotations

import msgspec
import pytest
from support.fakes import EOS, FakeConstraint, FakeWorker, embedding, expected_beams, expected_output

from rayllm.api.sampling_params import SamplingParams, derive_seed
from rayllm.api.types import GenerationRequest, KVCosts, StepCost, StepPlan, TokenDelta
from rayllm.config.kv_groups import STATE_WINDOW
from rayllm.core.adapter_slots import AdapterSlots
from rayllm.core.check import check_scheduler
from rayllm.core.chunk_budget import ChunkBudget
from rayllm.core.memory import KVMemory, WriteBackLimits
from rayllm.core.policy import POLICIES
from rayllm.core.scheduler import Scheduler
from rayllm.core.state import SchedulerState

CHEAP = KVCosts(recompute_token=1.0, swap_out_block=1e-3, swap_in_block=1e-3)  # to move, that is
DEAR = KVCosts(recompute_token=1.0, swap_out_block=1e3, swap_in_block=1e3)
EVEN = KVCosts(recompute_token=1.0, swap_out_block=1.4, swap_in_block=1.4, transfer=2.0)  # what pays depends


def make_scheduler(
    *,
    num_blocks: int,
    block_size: int,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 16,
    max_model_len: int | None = None,
    num_cpu_blocks: int = 0,
    caching: bool = True,
    costs: KVCosts | None = CHEAP,
    windows: tuple[int | None, ...] = (None,),
    states: int = 0,
    policy: str = "fcfs",
    preemption_mode: str = "cost",
    growth_blocks: int = 1,
    target_itl: float | None = None,
    step_costs: dict[int, StepCost] | None = None,
    num_slots: int = 0,
    clock=lambda: 0.0,
) -> Scheduler:
    """A scheduler with small limits, which writes to the host ahead in pools of a few blocks, too.

    states: so many groups with recurrent states follow those of `windows`.
    """
    windows = (*windows, *[STATE_WINDOW] * states)
    memory = KVMemory(
        num_blocks=num_blocks,
        block_size=block_size,
        num_cpu_blocks=num_cpu_blocks,
        caching=caching,
        costs=costs,
        windows=windows,
        write_back=WriteBackLimits(2 * max_num_batched_tokens // block_size, blocks_a_step=2, host_share=1),
        recurrent=states > 0,
    )
    adapters = AdapterSlots(num_slots)
    adapters.loaded.update(range(100))
    state = SchedulerState(
        memory,
        adapters=adapters,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=num_blocks * block_size if max_model_len is None else max_model_len,
        eos_token_ids=[EOS],
        preemptive=policy == "priority",
        preemption_mode=preemption_mode,
        growth_blocks=growth_blocks,
        clock=clock,
    )
    budget = None
    if target_itl is not None:
        widest = None if None in windows else max(windows)
        budget = ChunkBudget(target_itl, max_num_batched_tokens, widest, step_costs or {})
    return Scheduler(state, policy=POLICIES[policy], chunk_budget=budget)


class Harness:
    """A scheduler and a fake worker with up to `depth` plans in flight; collects what fronts would see.

    options: of `make_scheduler`.
    """

    def __init__(self, *, depth: int = 1, **options: object):
        self._options = options
        self.scheduler = make_scheduler(**options)
        state, memory = self.scheduler.state, self.scheduler.state.memory
        self._make_worker = lambda: FakeWorker(
            memory.gpu.num_blocks,
            memory.block_size,
            state.max_num_seqs,
            memory.cpu.num_blocks,
            tuple(window.tokens for window in memory.windows),
            options.get("states", 0),
        )
        self.worker = self._make_worker()
        self.depth = depth
        self.results: list = []
        self.outputs: dict[tuple[str, int], list[int]] = {}
        self.reasons: dict[tuple[str, int], str] = {}
        self.requests: dict[str, GenerationRequest] = {}
        self.constraints: dict[str, dict | None] = {}
        self.adapters: dict[str, int | None] = {}
        self.slots: dict[int, int] = {}  # the worker's: slot -> adapter
        self.aborted: set[str] = set()
        self.ended: set[tuple[str, int]] = set()
        self.plans: list[StepPlan] = []
        self.last_deltas: dict[tuple[str, int], TokenDelta] = {}

    def add(
        self,
        request_id: str,
        prompt: list[int],
        priority: int = 0,
        salt: str = "",
        constraint: dict | None = None,
        pooling: str | None = None,
        adapter: int | None = None,
        **params: object,
    ) -> None:
        if pooling is not None:
            constraint, params = None, {}
        request = GenerationRequest(
            request_id=request_id,
            prompt_token_ids=prompt,
            params=SamplingParams(**params),
            priority=priority,
            cache_salt=salt,
            pooling=pooling,
        )
        self.requests[request_id] = request
        self.constraints[request_id] = constraint
        self.adapters[request_id] = adapter
        self._send(request)
        check_scheduler(self.scheduler)

    def _send(self, request: GenerationRequest) -> None:
        constraint, adapter = self.constraints[request.request_id], self.adapters[request.request_id]
        self.scheduler.add(request, None if constraint is None else lambda: FakeConstraint(**constraint), adapter)

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id)
        if request_id in self.requests:
            self.aborted.add(request_id)
        check_scheduler(self.scheduler)

    def end(self, request_id: str, index: int) -> None:
        """End one completion, if there is such."""
        self.scheduler.abort(request_id, index)
        request = self.requests.get(request_id)
        if request is not None and index < request.params.width and not request.params.use_beam_search:
            if request.params.width == 1:
                self.aborted.add(request_id)
            self.ended.add((request_id, index))
        check_scheduler(self.scheduler)

    def step(self) -> bool:
        """One turn of the engine loop. False if there was nothing to do."""
        plan = self.scheduler.schedule()
        check_scheduler(self.scheduler)
        self.deliver(self.scheduler.new_deltas)
        if plan is not None:
            self.plans.append(plan)
            self.check_adapters(plan)
            self.results.append(self.worker.execute(plan))
        if not self.results:
            return bool(self.scheduler.new_deltas) or bool(self.scheduler.state.awaiting_mask)
        if plan is None or len(self.results) >= self.depth:
            self.deliver(self.scheduler.update(self.results.pop(0)))
        return True

    def check_adapters(self, plan: StepPlan) -> None:
        """Every sequence that the plan lets in finds its adapter in its slot, and a slot that is used stays."""
        running = {seq.row: seq for seq in self.scheduler.state.running}
        for slot, adapter in plan.adapters:
            self.slots[slot] = adapter
        for seq in running.values():
            assert seq.group.adapter == (None if seq.adapter_slot < 0 else self.slots[seq.adapter_slot])
        for data in plan.new:
            if data.row in running:
                assert data.adapter_slot == running[data.row].adapter_slot

    def lose_worker(self) -> None:
        """Another worker, which knows nothing, takes over; results that are on their way are lost."""
        self.worker, self.results, self.slots = self._make_worker(), [], {}
        self.deliver(self.scheduler.restart(1.0))

    def lose_engine(self) -> None:
        """Another scheduler and worker take over what fronts have of each request that has not ended."""
        self.scheduler, self.worker, self.results = make_scheduler(**self._options), self._make_worker(), []
        for request in self.requests.values():
            keys = [(request.request_id, index) for index in range(request.params.num_completions)]
            live = [key for key in keys if key not in self.reasons and key not in self.ended]
            if request.request_id in self.aborted or not live:
                continue
            begun = any(key in self.outputs or key in self.ended for key in keys) and request.pooling is None
            if begun and not request.params.use_beam_search:
                emitted = {key[1]: list(self.outputs.get(key, [])) for key in live}
                request = msgspec.structs.replace(request, emitted=emitted)
            self._send(request)
            check_scheduler(self.scheduler)

    def deliver(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            key = (delta.request_id, delta.index)
            assert key not in self.reasons, f"{key} got a token after its end"
            assert delta.request_id not in self.aborted and key not in self.ended
            self.outputs.setdefault(key, []).extend(delta.token_ids)
            if delta.finish_reason:
                self.reasons[key] = delta.finish_reason
                self.last_deltas[key] = delta
        check_scheduler(self.scheduler)

    def run(self, limit: int = 20_000) -> None:
        for _ in range(limit):
            if not self.step():
                break
        assert not self.scheduler.has_work(), "a request starves"

    def check_done(self) -> None:
        """Every request that was not aborted has exactly the output of the naive oracle; nothing is left behind."""
        seeds = {}
        for request in self.requests.values():
            if request.request_id in self.aborted:
                continue
            if request.pooling is not None:
                last = self.last_deltas[request.request_id, 0]
                assert last.embedding == embedding(request.prompt_token_ids, request.pooling), request.request_id
                assert last.finish_reason == "stop" and not self.outputs[request.request_id, 0]
                continue
            params = request.params
            if params.use_beam_search:
                self.check_beams(request)
                continue
            for index in range(params.width):
                key = (request.request_id, index)
                seeds[key] = self.seeds[key]
                limit = min(self.scheduler.state.max_model_len, len(request.prompt_token_ids) + params.max_tokens)
                stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else {EOS})
                options = self.constraints[request.request_id]
                constraint = None if options is None else FakeConstraint(**options)
                expected = expected_output(request.prompt_token_ids, self.seeds[key], limit, stops, constraint)
                if key in self.ended:
                    got = self.outputs.get(key, [])
                    assert got == expected[: len(got)], key
                    continue
                assert self.outputs[key] == expected, key
                reason = "length" if len(request.prompt_token_ids) + len(expected) >= limit else "error"
                assert self.reasons[key] == ("stop" if expected[-1] in stops else reason)
        stats = self.scheduler.stats()
        assert stats.num_used_blocks == stats.num_running == stats.num_waiting == 0
        assert stats.num_used_cpu_blocks == stats.num_swapped == 0

    def check_beams(self, request: GenerationRequest) -> None:
        params = request.params
        limit = min(self.scheduler.state.max_model_len, len(request.prompt_token_ids) + params.max_tokens)
        stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else {EOS})
        expected = expected_beams(request.prompt_token_ids, params, limit, stops)
        assert len(expected) == params.n
        for index, (tokens, cumulative) in enumerate(expected):
            key = (request.request_id, index)
            last = self.last_deltas[key]
            assert self.outputs[key] == last.token_ids == tokens, key
            assert last.cumulative_logprob == cumulative, key
            assert last.finish_reason == ("stop" if tokens[-1] in stops else "length"), key
            assert last.stop_reason == (tokens[-1] if tokens[-1] in params.stop_token_ids else None)
            if params.logprobs is not None:
                assert [entry.token_id for entry in last.logprobs] == tokens
                assert sum(entry.logprob for entry in last.logprobs) == pytest.approx(cumulative)

    @property
    def seeds(self) -> dict[tuple[str, int], int]:
        return {
            (r.request_id, i): derive_seed(r.params.seed, i)
            for r in self.requests.values()
            for i in range(r.params.width)
        }
