"""What steps take, as learned from steps, and the inter-token latency that chunks are cut for, on a made-up device."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.model_factory import make_model
from support.scheduler import Harness, make_scheduler

from rayllm import LLM
from rayllm.api.sampling_params import SamplingParams
from rayllm.api.types import GenerationRequest, StepCost, StepResult
from rayllm.config.options import EngineConfig, make_config
from rayllm.core.check import check_scheduler
from rayllm.core.chunk_budget import MIN_CHUNK, SPARE_TOKENS, StepTimes, StepWork, attended
from rayllm.errors import ConfigError

TARGET = 0.030


@given(start=st.integers(0, 60), count=st.integers(0, 60), window=st.sampled_from([None, 1, 2, 17, 50]))
def test_attended_pairs(start, count, window):
    expected = sum(min(p + 1, window or p + 1) for p in range(start, start + count))
    assert attended(start, count, window) == expected


def seconds_of(work: StepWork) -> float:
    """About an 8B model on an H200: 6 ms for the weights, 38,000 prompt tokens a second, and their attention."""
    return 6e-3 + 2e-5 * work.decodes + 2.6e-5 * work.prompt_tokens + 1.0e-9 * work.pairs


def test_a_linear_device_is_known_after_a_few_steps():
    times, rng = StepTimes(), random.Random(0)
    for _ in range(120):
        tokens = rng.choice([0, 0, rng.randint(1, 4000)])
        work = StepWork(rng.randint(1, 200), tokens, attended(rng.randint(0, 30_000), tokens, None))
        times.observe(work, seconds_of(work))
    for work in (StepWork(100, 0, 0), StepWork(1, 2000, attended(20_000, 2000, None)), StepWork(200, 300, 50_000)):
        assert times.predict(work) == pytest.approx(seconds_of(work), rel=1e-3)
    assert times.error < 0.05


def test_a_long_time_without_prompts_does_not_forget_what_they_cost():
    times = StepTimes()
    for i in range(20):
        work = StepWork(32, 200 + 20 * i, attended(500 * i, 200 + 20 * i, None))
        times.observe(work, seconds_of(work))
    for _ in range(5000):
        times.observe(StepWork(32, 0, 0), seconds_of(StepWork(32, 0, 0)))
    work = StepWork(32, 500, attended(8000, 500, None))
    assert times.predict(work) == pytest.approx(seconds_of(work), rel=0.02)


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 300), st.integers(0, 20_000), st.integers(0, 30_000), st.floats(-1, 100)), max_size=40
    )
)
def test_whatever_steps_take_more_work_never_takes_less(steps):
    times = StepTimes()
    for decodes, tokens, start, seconds in steps:
        times.observe(StepWork(decodes, tokens, attended(start, tokens, None)), seconds)
    small, large = StepWork(8, 100, 10_000), StepWork(9, 101, 10_101)
    assert 0 <= times.predict(small) <= times.predict(large)
    assert math.isfinite(times.predict(large)) and math.isfinite(times.error)


class Device:
    """Steps on a simulated clock, up to `depth` in flight; between[i]: seconds between results i and i + 1."""

    def __init__(self, seconds: Callable[[StepWork, float], float], target: float | None, depth: int, **options: Any):
        self.now = 0.0
        self.step_sizes = list(options.get("step_costs", ()))
        settings = {
            "num_blocks": 12_000,
            "block_size": 16,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 8192,
            "max_model_len": 40_000,
            **options,
        }
        self.scheduler = make_scheduler(**settings, target_itl=target, clock=lambda: self.now, caching=False)
        self.seconds, self.depth = seconds, depth
        self.running: deque[tuple[float, StepResult, int]] = deque()
        self.device_free = 0.0
        self.between: list[float] = []
        self.chunks: list[int] = []

    def add(self, name: str, length: int, max_tokens: int) -> None:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self.scheduler.add(GenerationRequest(request_id=name, prompt_token_ids=[5] * length, params=params))

    def step(self) -> None:
        plan = self.scheduler.schedule()
        if plan is not None:
            self.now += 1e-4  # the host's part
            record = self.scheduler.in_flight[-1]
            chunks = list(zip(plan.rows, plan.num_tokens, strict=True))[plan.num_decodes :]
            pairs = sum(attended(record.by_row[row].num_computed - n, n, None) for row, n in chunks)
            tokens = sum(n for _row, n in chunks)
            self.chunks.append(tokens)
            if tokens:
                size = plan.num_decodes + tokens
                tokens = min((s for s in self.step_sizes if s >= size), default=size) - plan.num_decodes
            work = StepWork(plan.num_decodes, tokens, pairs)
            self.device_free = max(self.now, self.device_free) + self.seconds(work, self.now)
            self.running.append((self.device_free, StepResult(plan.step_id, [9] * plan.num_sampled), plan.num_decodes))
        if self.running and (plan is None or len(self.running) >= self.depth):
            end, result, num_decodes = self.running.popleft()
            before, self.now = self.now, max(self.now, end)
            if num_decodes:
                self.between.append(self.now - self.last_result)
            self.last_result = self.now
            assert self.now >= before
            self.scheduler.update(result)

    last_result = 0.0

    def arrive_among_streams(self, prompts: int = 1) -> list[float]:
        """32 streams, then prompts of 32k tokens, one after the other: inter-token latencies from their arrival on."""
        for i in range(32):
            self.add(f"stream {i}", 200 + i, 4000)
        for _ in range(60):
            self.step()
        first = len(self.between)
        for i in range(prompts):
            self.add(f"long {i}", 32_000, 1)
            while f"long {i}" in self.scheduler.state.groups:
                self.step()
        check_scheduler(self.scheduler)
        return self.between[first:]


def p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * len(values))]


def steady(work: StepWork, _now: float) -> float:
    return seconds_of(work)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_long_prompt_does_not_hold_up_streams(depth):
    fixed = Device(steady, None, depth).arrive_among_streams()
    assert p99(fixed) > 10 * TARGET
    device = Device(steady, TARGET, depth)
    latencies = device.arrive_among_streams()
    assert p99(latencies) <= TARGET
    used = sum(latencies) / len(latencies)
    assert used > 0.75 * TARGET, "the time that is left goes to the prompt"
    assert device.scheduler.stats().prefill_chunk_limit > MIN_CHUNK


@pytest.mark.parametrize("seed", range(3))
def test_noise_is_allowed_for(seed):
    rng = random.Random(seed)
    device = Device(lambda work, _now: seconds_of(work) * math.exp(rng.gauss(0, 0.05)), TARGET, 2)
    latencies = device.arrive_among_streams(prompts=4)
    assert p99(latencies) <= TARGET
    assert sum(latencies) / len(latencies) > 0.6 * TARGET


def test_a_device_that_is_not_linear():
    """Up to some 230 tokens cost no more than reading the weights: what some lengths teach misleads about others."""
    device = Device(lambda work, _now: max(6e-3, seconds_of(work) - 6e-3) + 1e-3, TARGET, 2)
    latencies = device.arrive_among_streams(prompts=3)
    assert p99(latencies) <= 1.05 * TARGET
    assert sum(latencies) / len(latencies) > 0.75 * TARGET


SIZES = [64, 128, 192, 256, 320, 384, 512, 640, 768, 896, 1024, 1280, 1536, 2048]
CONTEXT = 16384  # of the sequence that attention is measured with


def captured_seconds(tokens: int) -> float:
    """Of a step without attention: reading the weights, or computing in tiles of 128 tokens."""
    return max(8.2e-3, 2.5e-3 + 2.15e-5 * 128 * math.ceil(tokens / 128))


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_steps_that_are_padded_and_not_linear(noise):
    """As the workers' captured steps are. Decodes alone take less than what steps with prompts let expect of them."""
    rng = random.Random(0)

    def seconds(work: StepWork, _now: float) -> float:
        if not work.prompt_tokens:
            return 8.4e-3
        base = captured_seconds(work.decodes + work.prompt_tokens) + 1e-4 + 1.4e-9 * work.pairs
        return base * math.exp(rng.gauss(0, noise))

    costs = {}
    for size in SIZES:
        attention = 1.4e-9 * attended(CONTEXT - size, size, None)
        costs[size] = StepCost(captured_seconds(size), captured_seconds(size) + attention, CONTEXT)
    device = Device(seconds, TARGET, 2, step_costs=costs)
    latencies = device.arrive_among_streams(prompts=5)
    assert p99(latencies) <= TARGET
    assert max(latencies) <= 1.02 * TARGET
    assert sum(latencies) / len(latencies) > 0.8 * TARGET
    assert device.scheduler.chunk_budget.times.error < 0.005 + 1.5 * noise


def wave_seconds(tokens: int, context: int) -> float:
    """Of a chunk's attention: a task for 32 of its tokens and each of 8 KV heads, 132 at a time."""
    return math.ceil(8 * math.ceil(tokens / 32) / 132) * 4.7e-7 * (context - tokens / 2)


@pytest.mark.parametrize("hot", [1.0, 1.1, 1.2])
@pytest.mark.parametrize("target", [0.03, 0.05, 0.1])
def test_attention_in_waves(target, hot):
    """A step of 512 tokens has one wave and one of 640 two; under load, all takes longer than when it was measured."""
    rng = random.Random(0)
    costs = {
        size: StepCost(captured_seconds(size), captured_seconds(size) + wave_seconds(size, CONTEXT), CONTEXT)
        for size in SIZES
    }

    def seconds(work: StepWork, _now: float) -> float:
        if not work.prompt_tokens:
            return 5.6e-3
        tokens = device.chunks[-1]
        context = work.pairs / tokens + tokens / 2
        taken = captured_seconds(work.decodes + work.prompt_tokens) + wave_seconds(tokens, int(context))
        return (hot * taken + 5e-4) * math.exp(rng.gauss(0, 0.01 * (hot > 1)))

    device = Device(seconds, target, 2, step_costs=costs)
    latencies = device.arrive_among_streams(prompts=5)
    assert p99(latencies) <= target
    assert max(latencies) <= 1.08 * target
    assert device.scheduler.chunk_budget.times.error < 0.06
    # Where a longer step computes fewer prompt tokens a second, it is not taken.
    filled = [size - 32 - SPARE_TOKENS for size in SIZES]
    assert filled[SIZES.index(512)] in device.chunks
    if hot == 1 and target == 0.03:
        assert not set(filled[SIZES.index(640) :]) & set(device.chunks[-40:])


def test_many_prompts_at_once_fill_steps_together():
    def seconds(work: StepWork, _now: float) -> float:
        if not work.prompt_tokens:
            return 5.6e-3
        return captured_seconds(work.decodes + work.prompt_tokens) + 5e-4 + 1.5e-9 * work.pairs

    costs = {}
    for size in SIZES:
        attention = 1.5e-9 * attended(CONTEXT - size, size, None)
        costs[size] = StepCost(captured_seconds(size), captured_seconds(size) + attention, CONTEXT)
    device = Device(seconds, TARGET, 2, step_costs=costs)
    rng = random.Random(0)
    for i in range(24):
        device.add(f"stream {i}", 100, 3000)
    for _ in range(40):
        device.step()
    first, chunks = len(device.between), len(device.chunks)
    lengths = [rng.choice([1, 2, 40, 150, 700, 3000]) for _ in range(120)]
    for i in range(0, len(lengths), 12):
        for j, length in enumerate(lengths[i : i + 12]):
            device.add(f"prompt {i + j}", length, 3)
        for _ in range(15):
            device.step()
    while any(name.startswith("prompt") for name in device.scheduler.state.groups):
        device.step()
    check_scheduler(device.scheduler)
    assert p99(device.between[first:]) <= TARGET
    assert sum(device.chunks[chunks:]) >= sum(length for length in lengths if length > 2)
    full = [tokens for tokens in device.chunks[chunks:] if tokens >= 256]
    assert sum(full) > 0.8 * sum(lengths), "short prompts share steps"


def test_what_was_measured_at_the_start_is_not_forgotten():
    """After hundreds of steps of one size, those of others are still known."""
    without = [(StepWork(0, size, 0, size), 2e-5 * size) for size in SIZES]
    times = StepTimes(without + [(StepWork(0, size, 1e7, size), 2e-5 * size + 7e-3) for size in SIZES])
    for i in range(400):
        work = StepWork(32, 96, 4e6 + 1e4 * (i % 100), 128)
        times.observe(work, 1.2 * (2e-5 * 128 + 7e-10 * work.pairs) + 5e-4)
    work = StepWork(32, 992, 1e6, 1024)
    assert times.predict(work) == pytest.approx(1.2 * (2e-5 * 1024 + 7e-4) + 5e-4, rel=0.05)


def test_a_device_that_slows_down_is_followed():
    """Twice as slow within ten seconds, and some noise."""
    rng = random.Random(1)
    device = Device(
        lambda work, now: seconds_of(work) * min(2.0, 1 + now / 10) * math.exp(rng.gauss(0, 0.02)), TARGET, 2
    )
    latencies = device.arrive_among_streams(prompts=5)
    assert p99(latencies) <= TARGET
    assert sum(latencies) / len(latencies) > 0.6 * TARGET


def test_a_sudden_change_is_over_the_target_for_a_few_steps_only():
    device = Device(lambda work, now: seconds_of(work) * (1 + (now > 3)), TARGET, 2)
    latencies = device.arrive_among_streams(prompts=4)
    assert sum(latency > TARGET for latency in latencies) <= 12
    assert latencies[-1] <= TARGET and len(latencies) > 300


def test_a_hiccup_is_forgotten():
    hiccups = iter([0.5])
    device = Device(lambda work, now: seconds_of(work) + (next(hiccups, 0) if now > 2 else 0), TARGET, 2)
    latencies = device.arrive_among_streams(prompts=3)
    assert sum(latency > TARGET for latency in latencies) == 1
    assert sum(latencies[-50:]) / 50 > 0.7 * TARGET


def test_prompts_make_progress_beside_decodes_that_take_too_long():
    device = Device(steady, 1e-3, 2)
    device.arrive_among_streams()
    beside = device.chunks[100:-40]
    assert set(beside) == {MIN_CHUNK}


def test_a_prompt_alone_takes_all_it_can():
    device = Device(steady, TARGET, 2)
    device.add("long", 32_000, 1)
    while device.scheduler.has_work():
        device.step()
    assert device.chunks == [8192, 8192, 8192, 32_000 - 3 * 8192]


def test_without_a_clock_chunks_stay_short_and_outputs_right():
    harness = Harness(
        num_blocks=200, block_size=4, max_num_seqs=6, max_num_batched_tokens=600, target_itl=1e-3, depth=2
    )
    for i in range(4):
        harness.add(f"r{i}", [i] * (300 * (i % 2) + 5), max_tokens=30, seed=i, n=1 + i % 2)
        harness.step()
    harness.run()
    harness.check_done()
    mixed = [plan for plan in harness.plans if plan.num_decodes]
    assert max(sum(plan.num_tokens[plan.num_decodes :]) for plan in mixed) == 2 * MIN_CHUNK


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_prompts_that_have_to_wait_in_the_batch(monkeypatch, policy, window):
    """No time for more than two tokens a step: sequences enter, fork, are preempted and swapped before they compute."""
    monkeypatch.setattr("rayllm.core.chunk_budget.MIN_CHUNK", 2)
    rng = random.Random(3)
    harness = Harness(
        num_blocks=14,
        block_size=4,
        max_num_seqs=6,
        max_num_batched_tokens=24,
        policy=policy,
        target_itl=1e-3,
        depth=2,
        num_cpu_blocks=8,
        growth_blocks=0,
        windows=(window,),
        max_model_len=56,
    )
    for i in range(40):
        prompt = [rng.randrange(4) for _ in range(rng.randint(1, 20))]
        harness.add(f"r{i}", prompt, rng.randint(0, 2), n=rng.choice([1, 1, 3]), max_tokens=rng.randint(1, 28), seed=i)
        for _ in range(rng.randint(0, 6)):
            harness.step()
        if rng.random() < 0.1:
            harness.abort(f"r{rng.randint(0, i)}")
    harness.run()
    harness.check_done()
    waits = [plan for plan in harness.plans if not {data.row for data in plan.new} <= set(plan.rows)]
    assert len(waits) > 10


def test_an_engine_with_a_target(tmp_path):
    folder = make_model(tmp_path, "qwen2")
    prompts = [[7 * i % 200 + j % 50 for j in range(length)] for i, length in enumerate((30, 300, 20, 350))]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    results = []
    for target in (None, 0.1):
        with LLM(
            folder, device="cpu", skip_tokenizer_init=True, target_itl_ms=target, max_num_batched_tokens=480
        ) as llm:
            results.append([o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)])
            assert llm.stats().prefill_chunk_limit == (0 if target is None else MIN_CHUNK)
    assert results[0] == results[1]


@pytest.mark.parametrize("value", [0, -5, float("nan"), float("inf"), "fast"])
def test_targets_that_are_none(value):
    with pytest.raises(ConfigError, match="target_itl_ms: input should be"):
        make_config(EngineConfig, {"target_itl_ms": value})
