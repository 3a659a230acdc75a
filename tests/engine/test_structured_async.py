"""Structured outputs beside other requests: what compiles, waits, fails or is hostile holds up nobody else."""

from __future__ import annotations

import asyncio
import functools
import itertools
import re
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import aclosing, asynccontextmanager

import pytest
import torch
from support.driver import RecordingFront, until, wait_for, whole

from rayllm import timeouts
from rayllm.api.sampling_params import SamplingParams, StructuredOutputs
from rayllm.api.types import GenerationRequest
from rayllm.config.options import EngineConfig
from rayllm.config.resolved import resolve
from rayllm.engine.async_engine import AsyncEngine
from rayllm.engine.driver import EngineDriver
from rayllm.engine.engine import EngineCore, refusal
from rayllm.errors import EngineDeadError, InvalidRequestError
from rayllm.executor.local import LocalExecutor
from rayllm.text.grammar import Grammar, GrammarTokenizer
from rayllm.text.grammar_compiler import GrammarCompiler
from rayllm.text.tokenizer import load_tokenizer

IDS = itertools.count()
WORD = StructuredOutputs(regex="[a-z]{3,8}-[0-9]{2}")
HARD = [f"(((a{{100}}){{100}}){{100}}){{{i}}}" for i in range(96, 100)]  # a quarter of a second each, then too large


def request(structure: StructuredOutputs | None = None, max_tokens: int = 30, **options) -> GenerationRequest:
    settings = {"temperature": 1.0, "seed": 1, "max_tokens": max_tokens, "structured_outputs": structure, **options}
    return GenerationRequest(request_id=f"r{next(IDS)}", prompt_token_ids=[7, 8, 9], params=SamplingParams(**settings))


def free(max_tokens: int = 30) -> GenerationRequest:
    return request(max_tokens=max_tokens, ignore_eos=True)


class Compiler(GrammarCompiler):
    """While there is `held`, it is the grammar of all requests; the test says when it is ready."""

    held: Future[Grammar] | None = None

    def compile(self, structure: StructuredOutputs, client: str | None = None, gently: bool = False) -> Future[Grammar]:
        return self.held or super().compile(structure, client, gently)

    def hold(self) -> Future[Grammar]:
        self.held = Future()
        return self.held


def start_core(max_num_seqs: int) -> tuple[EngineCore, Compiler]:
    torch.set_num_threads(1)
    config = resolve(EngineConfig(device="cpu", max_num_seqs=max_num_seqs), 0)
    compiler = Compiler(config.options.model, config.spec.vocab_size, config.spec.eos_token_ids)
    executor = LocalExecutor(config)
    return EngineCore(config, executor, executor.start(), compiler), compiler


@asynccontextmanager
async def real_engine() -> AsyncIterator[tuple[AsyncEngine, EngineCore, Compiler]]:
    """An engine with the bundled model, which has nothing left at the end, its core and what makes its grammars."""
    core, compiler = start_core(max_num_seqs=16)
    engine = AsyncEngine(core, load_tokenizer(core.info.model))
    await engine.start()
    try:
        yield engine, core, compiler
        if engine.dead is None:
            await until(lambda: not engine.driver.busy)
            assert not core.is_compiling
            core.check_integrity()
    finally:
        await engine.close()


def in_a_loop(test):
    """Run an async test; what it asks for are fixtures."""

    @functools.wraps(test)
    def run(**fixtures):
        asyncio.run(asyncio.wait_for(test(**fixtures), 120))

    return run


@in_a_loop
async def test_a_refusal_is_an_invalid_request_and_the_engine_goes_on():
    async with real_engine() as (engine, _core, _compiler):
        with pytest.raises(InvalidRequestError, match="unclosed group") as caught:
            await anext(engine.generate(request(StructuredOutputs(regex="(a"), n=2)))
        assert caught.value.param == "structured_outputs"
        total = await whole(engine.generate(request(WORD, n=3)))
        assert all(re.fullmatch(WORD.regex, completion.text) for completion in total.outputs)


@in_a_loop
async def test_a_stream_goes_on_beside_hostile_grammars():
    async with real_engine() as (engine, _core, _compiler):
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
            f"\n4 hard grammars: {len(gaps)} gaps, median {gaps[len(gaps) // 2] * 1e3:.1f} ms, "
            f"p99 {gaps[len(gaps) * 99 // 100] * 1e3:.1f} ms, longest {gaps[-1] * 1e3:.1f} ms"
        )
        await reading
        assert seen == alone
        assert "b" in (await whole(engine.generate(request(StructuredOutputs(regex="(a+)+b"), 400)))).outputs[0].text


@in_a_loop
async def test_others_pass_a_request_that_waits_for_its_grammar():
    async with real_engine() as (engine, core, compiler):
        ready = compiler.compile(WORD)
        held = compiler.hold()
        waiting = asyncio.create_task(whole(engine.generate(request(WORD))))
        await until(lambda: core.is_compiling)
        for _ in range(3):
            assert len((await whole(engine.generate(free(20)))).outputs[0].token_ids) == 20
            assert len((await whole(engine.generate(request(max_tokens=5)))).outputs[0].token_ids) <= 5
        assert not waiting.done() and core.is_compiling
        held.set_result(ready.result(30))
        assert re.fullmatch(WORD.regex, (await waiting).outputs[0].text)


@in_a_loop
async def test_a_request_that_leaves_while_its_grammar_is_compiled():
    async with real_engine() as (engine, core, compiler):
        held = compiler.hold()
        waiting = asyncio.create_task(whole(engine.generate(request(WORD))))
        await until(lambda: core.is_compiling)
        waiting.cancel()
        await until(lambda: not core.is_compiling)
        assert held.cancelled()
        await until(lambda: not engine.driver.busy)
        assert engine.stats().prompt_tokens == 0, "the request never came as far as the scheduler"
        assert len((await whole(engine.generate(free(5)))).outputs[0].token_ids) == 5


@in_a_loop
async def test_a_grammar_that_fails_by_our_fault_ends_its_request_alone():
    """As when the library panics, which is no Exception."""

    class Panic(BaseException):
        pass

    async with real_engine() as (engine, core, compiler):
        alone = (await whole(engine.generate(free(60)))).outputs[0].token_ids
        held = compiler.hold()
        waiting = asyncio.create_task(whole(engine.generate(request(WORD, n=2))))
        await until(lambda: core.is_compiling)
        other = asyncio.create_task(whole(engine.generate(free(60))))
        await until(lambda: engine.stats().num_running)
        held.set_exception(Panic("index out of bounds"))
        completions = (await waiting).outputs
        assert [completion.finish_reason for completion in completions] == ["error", "error"]
        assert "internal error" in completions[0].stop_reason and "index out of bounds" in completions[0].stop_reason
        assert (await other).outputs[0].token_ids == alone
        assert engine.dead is None


@in_a_loop
async def test_an_engine_that_stops_answers_what_waits_for_a_grammar():
    async with real_engine() as (engine, core, compiler):
        compiler.hold()
        waiting = asyncio.create_task(whole(engine.generate(request(WORD))))
        await until(lambda: core.is_compiling)
        await asyncio.to_thread(engine.driver.shutdown, 5)
        with pytest.raises(EngineDeadError, match="shut down"):
            await waiting


@in_a_loop
async def test_others_pass_a_sequence_whose_mask_is_slow(monkeypatch):
    async with real_engine() as (engine, _core, compiler):
        compiler.compile(WORD).result(30)
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


@in_a_loop
async def test_a_grammar_that_fails_in_mid_text_ends_its_request_alone(monkeypatch):
    async with real_engine() as (engine, _core, compiler):
        alone = (await whole(engine.generate(free(60)))).outputs[0].token_ids
        compiler.compile(WORD).result(30)
        real, calls = GrammarTokenizer.mask_of, itertools.count()

        def failing(self, matcher):
            if next(calls) == 3:
                raise ValueError("the limit is reached")
            return real(self, matcher)

        monkeypatch.setattr(GrammarTokenizer, "mask_of", failing)
        other = asyncio.create_task(whole(engine.generate(free(60))))
        token_ids: list[int] = []

        async def read() -> None:
            async for output in engine.generate(request(WORD)):
                token_ids.extend(output.outputs[0].token_ids)

        with pytest.raises(InvalidRequestError, match="structured_outputs: its text cannot go on: the limit") as caught:
            await read()
        assert caught.value.param == "structured_outputs"
        assert len(token_ids) == 4
        assert (await other).outputs[0].token_ids == alone


@in_a_loop
async def test_a_limit_that_one_of_several_completions_meets_ends_the_request(monkeypatch):
    async with real_engine() as (engine, _core, compiler):
        compiler.compile(WORD).result(30)
        real, calls = GrammarTokenizer.mask_of, itertools.count()

        def failing(self, matcher):
            if next(calls) == 8:
                raise ValueError("the limit is reached")
            return real(self, matcher)

        monkeypatch.setattr(GrammarTokenizer, "mask_of", failing)
        with pytest.raises(InvalidRequestError, match="its text cannot go on"):
            await whole(engine.generate(request(WORD, n=3)))
        await until(lambda: not engine.driver.busy)
        assert (engine.stats().num_running, engine.stats().num_waiting) == (0, 0)


@in_a_loop
async def test_a_mask_that_takes_too_long_ends_its_request(monkeypatch):
    """Ambiguous grammars take longer with each token."""
    async with real_engine() as (engine, _core, compiler):
        compiler.compile(WORD).result(30)
        monkeypatch.setattr(timeouts, "MASK_S", -1.0)
        with pytest.raises(InvalidRequestError, match="computing what may come next takes longer than -1 s"):
            await whole(engine.generate(request(WORD)))


def test_an_id_is_in_use_while_its_grammar_is_compiled():
    core, compiler = start_core(max_num_seqs=2)
    compiler.hold()
    driver = EngineDriver(core)
    front, first = RecordingFront(), request(WORD)
    driver.attach(front)
    driver.add(front, first)
    driver.add(front, first)
    wait_for(lambda: front.deltas)
    in_use = InvalidRequestError(f"request_id {first.request_id!r} is in use", "request_id")
    assert front.deltas == [refusal(first.request_id, in_use)]
    driver.shutdown()
    assert front.reasons == ["the engine was shut down"]
