"""Structured outputs beside other requests: what compiles, waits, fails or is hostile holds up nobody else."""

from __future__ import annotations

import asyncio
import itertools
import re
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import aclosing, asynccontextmanager

import pytest
import torch

from rayllm.api.sampling_params import SamplingParams, StructuredOutputs
from rayllm.api.types import GenerationRequest, RequestOutput, TokenDelta
from rayllm.config.options import EngineConfig
from rayllm.engine.async_engine import AsyncEngine
from rayllm.engine.client import InProcessClient, ZmqClient
from rayllm.engine.driver import EngineDriver, error_deltas
from rayllm.engine.engine import EngineCore, build_engine_core
from rayllm.errors import EngineDeadError, InvalidRequestError
from rayllm.text.grammar import GrammarTokenizer
from rayllm.text.outputs import accumulate
from rayllm.text.tokenizer import load_tokenizer

IDS = itertools.count()
WORD = StructuredOutputs(regex="[a-z]{3,8}-[0-9]{2}")
HARD = [f"(((a{{100}}){{100}}){{100}}){{{i}}}" for i in range(90, 100)]  # a quarter of a second each, then too large


def request(structure: StructuredOutputs | None = None, max_tokens: int = 30, **options) -> GenerationRequest:
    settings = {"temperature": 1.0, "seed": 1, "max_tokens": max_tokens, "structured_outputs": structure, **options}
    return GenerationRequest(request_id=f"r{next(IDS)}", prompt_token_ids=[7, 8, 9], params=SamplingParams(**settings))


def free(max_tokens: int = 30) -> GenerationRequest:
    return request(max_tokens=max_tokens, ignore_eos=True)


@asynccontextmanager
async def engine_on(kind: str) -> AsyncIterator[tuple[AsyncEngine, EngineDriver, EngineCore]]:
    torch.set_num_threads(1)
    config = EngineConfig(device="cpu", max_num_seqs=16)
    core = build_engine_core(config)
    driver = EngineDriver(core)
    driver.start()
    client = InProcessClient(driver, owns_driver=False) if kind == "local" else ZmqClient(driver.serve_zmq())
    engine = AsyncEngine(client, load_tokenizer(config.model))
    await engine.start()
    try:
        yield engine, driver, core
        if driver.dead is None:
            assert not driver._compiling and not driver._live
            core.check_integrity()
    finally:
        await engine.close()
        await asyncio.to_thread(driver.shutdown, 5)


def both(test):
    """Run an async test with each client."""

    @pytest.mark.parametrize("kind", ["local", "zmq"])
    def run(kind, monkeypatch):
        asyncio.run(asyncio.wait_for(test(kind, monkeypatch), 120))

    return run


async def whole(stream) -> RequestOutput:
    total = None
    async for output in stream:
        total = accumulate(total, output)
    return total


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0.002)


@both
async def test_a_refusal_is_an_invalid_request_and_the_engine_goes_on(kind, monkeypatch):
    async with engine_on(kind) as (engine, driver, _core):
        with pytest.raises(InvalidRequestError, match="unclosed group") as caught:
            await anext(engine.generate(request(StructuredOutputs(regex="(a"), n=2)))
        assert caught.value.param == "structured_outputs"
        assert not engine._streams
        total = await whole(engine.generate(request(WORD, n=3)))
        assert all(re.fullmatch(WORD.regex, completion.text) for completion in total.outputs)
        await until(lambda: not driver._live)


def test_a_stream_goes_on_beside_hostile_grammars():
    asyncio.run(asyncio.wait_for(stream_beside_hostile_grammars(), 120))


async def stream_beside_hostile_grammars() -> None:
    async with engine_on("zmq") as (engine, driver, _core):
        alone = (await whole(engine.generate(free(500)))).outputs[0].token_ids
        seen: list[int] = []
        times: list[float] = []

        async def read() -> None:
            async with aclosing(engine.generate(free(500))) as stream:
                async for output in stream:
                    seen.extend(output.outputs[0].token_ids)
                    times.append(time.perf_counter())

        async def refused(text: str) -> int:
            """Tokens that the stream got before the answer."""
            with pytest.raises(InvalidRequestError) as caught:
                await whole(engine.generate(request(StructuredOutputs(regex=text))))
            assert caught.value.param == "structured_outputs"
            return len(seen)

        reading = asyncio.create_task(read())
        await until(lambda: len(seen) >= 20)
        first, start = len(seen), len(times)
        counts = await asyncio.gather(*(refused(text) for text in [*HARD, "(" * 30000]))
        assert max(counts) - first >= 50, "the stream went on while they were compiled"
        gaps = sorted(b - a for a, b in itertools.pairwise(times[start : start + max(counts) - first]))
        print(
            f"\n10 hard schemas: {len(gaps)} gaps, median {gaps[len(gaps) // 2] * 1e3:.1f} ms, "
            f"p99 {gaps[len(gaps) * 99 // 100] * 1e3:.1f} ms, longest {gaps[-1] * 1e3:.1f} ms"
        )
        await reading
        assert seen == alone
        assert "b" in (await whole(engine.generate(request(StructuredOutputs(regex="(a+)+b"), 400)))).outputs[0].text
        await until(lambda: not driver._live)


@both
async def test_others_pass_a_request_that_waits_for_its_grammar(kind, monkeypatch):
    async with engine_on(kind) as (engine, driver, core):
        gate: Future = Future()
        ready = core._grammars.compile(WORD)
        monkeypatch.setattr(core._grammars, "compile", lambda *_: gate)
        waiting = asyncio.create_task(whole(engine.generate(request(WORD))))
        await until(lambda: driver._compiling)
        for _ in range(3):
            assert len((await whole(engine.generate(free(20)))).outputs[0].token_ids) == 20
            assert len((await whole(engine.generate(request(max_tokens=5)))).outputs[0].token_ids) <= 5
        assert not waiting.done() and driver._compiling
        gate.set_result(ready.result(30))
        assert re.fullmatch(WORD.regex, (await waiting).outputs[0].text)
        await until(lambda: not driver._live)


@both
async def test_a_request_that_leaves_while_its_grammar_is_compiled(kind, monkeypatch):
    async with engine_on(kind) as (engine, driver, core):
        gate: Future = Future()
        monkeypatch.setattr(core._grammars, "compile", lambda *_: gate)
        added: list[tuple] = []
        monkeypatch.setattr(core, "add", lambda *request: added.append(request))
        waiting = asyncio.create_task(whole(engine.generate(request(WORD))))
        await until(lambda: driver._compiling)
        waiting.cancel()
        await until(lambda: not driver._compiling)
        gate.set_exception(RuntimeError("late"))
        while not driver._inbox.empty():
            await asyncio.sleep(0.002)
        assert not added


@both
async def test_an_engine_that_stops_answers_what_waits_for_a_grammar(kind, monkeypatch):
    async with engine_on(kind) as (engine, driver, core):
        monkeypatch.setattr(core._grammars, "compile", lambda *_: Future())
        waiting = asyncio.create_task(whole(engine.generate(request(WORD))))
        await until(lambda: driver._compiling)
        await asyncio.to_thread(driver.shutdown, 5)
        with pytest.raises(EngineDeadError):
            await waiting


@both
async def test_others_pass_a_sequence_whose_mask_is_slow(kind, monkeypatch):
    async with engine_on(kind) as (engine, driver, core):
        core._grammars.compile(WORD).result(30)
        gate = threading.Event()
        real = GrammarTokenizer.mask_of

        def slow(self, matcher):
            gate.wait()
            return real(self, matcher)

        monkeypatch.setattr(GrammarTokenizer, "mask_of", slow)
        stream = engine.generate(request(WORD))
        text = (await anext(stream)).outputs[0].text  # the first mask was made with the grammar
        assert len((await whole(engine.generate(free(40)))).outputs[0].token_ids) == 40
        gate.set()
        text += (await whole(stream)).outputs[0].text
        assert re.fullmatch(WORD.regex, text)
        await until(lambda: not driver._live)


@both
async def test_a_grammar_that_fails_in_mid_text_ends_its_sequence_alone(kind, monkeypatch):
    async with engine_on(kind) as (engine, driver, core):
        alone = (await whole(engine.generate(free(60)))).outputs[0].token_ids
        core._grammars.compile(WORD).result(30)
        real, calls = GrammarTokenizer.mask_of, itertools.count()

        def failing(self, matcher):
            if next(calls) == 3:
                raise ValueError("the limit is reached")
            return real(self, matcher)

        monkeypatch.setattr(GrammarTokenizer, "mask_of", failing)
        bound, other = await asyncio.gather(whole(engine.generate(request(WORD))), whole(engine.generate(free(60))))
        (completion,) = bound.outputs
        assert (completion.finish_reason, completion.stop_reason) == (
            "error",
            "structured_outputs: the limit is reached",
        )
        assert len(completion.token_ids) == 4
        assert other.outputs[0].token_ids == alone
        await until(lambda: not driver._live)


class OneFront:
    """A front that keeps what it is given."""

    def __init__(self) -> None:
        self.deltas: list[TokenDelta] = []

    def deliver(self, deltas: list[TokenDelta]) -> None:
        self.deltas += deltas

    def dead(self, reason: str) -> None:
        pass


def test_an_id_is_in_use_while_its_grammar_is_compiled(monkeypatch):
    core = build_engine_core(EngineConfig(device="cpu", max_num_seqs=2))
    driver = EngineDriver(core)
    monkeypatch.setattr(core._grammars, "compile", lambda *_: Future())
    front, first = OneFront(), request(WORD)
    driver.attach(front)
    driver.start()
    driver.add(front, first)
    driver.add(front, first)
    while not front.deltas:
        time.sleep(0.002)
    message = f"request_id {first.request_id!r} is in use"
    assert front.deltas == error_deltas(first, message, bad_param="request_id")
    driver.shutdown()
    assert front.deltas[1:] == error_deltas(first, "the engine was shut down")
