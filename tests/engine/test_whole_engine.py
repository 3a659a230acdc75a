"""`WholeEngine` on a core that makes up tokens: whole completions, stop strings, refusals, aborts, the engine's end."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
from support.driver import FakeCore, fake_request, fake_tokens, wait_for

from rayllm.api.types import TokenDelta
from rayllm.config.options import BUNDLED_MODEL
from rayllm.engine.delta_buffer import DeltaBuffer
from rayllm.engine.whole_engine import WholeEngine
from rayllm.errors import EngineDeadError, InvalidRequestError
from rayllm.text.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer(BUNDLED_MODEL)
STORY = "The for statement is used to iterate over a list. STOP The end. " + "And so on. " * 100
TOKENS = TOKENIZER.encode(STORY)


def tell_story(_request, _index, position) -> int:
    return TOKENS[position]


@asynccontextmanager
async def engine_on(core, tokenizer=None):
    engine = WholeEngine(core, tokenizer)
    try:
        yield engine
    finally:
        if core.gated:
            core.allow(1000)
        await engine.close()


async def outputs_of(engine, request):
    return [output async for output in engine.generate(request)]


def test_a_completion_comes_whole():
    async def check():
        async with engine_on(FakeCore()) as engine:
            request = fake_request("a", max_tokens=5)
            (output,) = await outputs_of(engine, request)
            assert output.finished and output.outputs[0].token_ids == fake_tokens(request)
            several = await asyncio.gather(*(outputs_of(engine, fake_request(str(n), n=2)) for n in range(20)))
            assert all(each[-1].finished for each in several)

    asyncio.run(check())


def test_text_and_stop_strings():
    async def check():
        async with engine_on(FakeCore(tell_story), TOKENIZER) as engine:
            plain = (await outputs_of(engine, fake_request("a", max_tokens=40)))[-1]
            assert plain.outputs[0].text == TOKENIZER.decode(TOKENS[:40])
            texts = [
                completion.text
                for output in await outputs_of(engine, fake_request("b", max_tokens=100, stop=["STOP"]))
                for completion in output.outputs
            ]
            assert "".join(texts) == STORY[: STORY.index("STOP")]

    asyncio.run(check())


def test_what_the_core_refuses_is_raised():
    async def check():
        async with engine_on(FakeCore()) as engine:
            with pytest.raises(InvalidRequestError, match="does not like it"):
                await outputs_of(engine, fake_request("refused"))
            with pytest.raises(InvalidRequestError, match="stop strings need a tokenizer"):
                await outputs_of(engine, fake_request("a", stop=["x"]))
            assert len(await outputs_of(engine, fake_request("a"))) == 1

    asyncio.run(check())


def test_a_request_that_nobody_waits_for_is_aborted():
    async def check():
        core = FakeCore(gated=True)
        async with engine_on(core) as engine:
            task = asyncio.create_task(outputs_of(engine, fake_request("a", max_tokens=10_000)))
            core.allow()
            await asyncio.to_thread(wait_for, core.live)
            task.cancel()

            def has_ended():
                core.allow()  # the driver takes in what has come between two steps
                return not core.live()

            await asyncio.to_thread(wait_for, has_ended)
            assert ("abort", "a") in core.calls

    asyncio.run(check())


def test_requests_hear_of_the_engines_end():
    async def check():
        core = FakeCore(gated=True)
        async with engine_on(core) as engine:
            task = asyncio.create_task(outputs_of(engine, fake_request("a", max_tokens=100)))
            await asyncio.to_thread(wait_for, core.live)
            core.crash = RuntimeError("no more memory")
            core.allow()
            with pytest.raises(EngineDeadError, match="no more memory"):
                await task
            assert "no more memory" in engine.stopped
            with pytest.raises(EngineDeadError):
                await outputs_of(engine, fake_request("b"))

    asyncio.run(check())


def test_a_buffer_joins_deltas_and_passes_on_what_has_no_tokens():
    through = {"stops"}
    buffer = DeltaBuffer(through)
    assert buffer.merge([TokenDelta("a", 0, [], alone=True)]) == [TokenDelta("a", 0, [], alone=True)]
    assert buffer.merge([TokenDelta("a", 0, [1]), TokenDelta("stops", 0, [7])]) == [TokenDelta("stops", 0, [7])]
    assert buffer.merge([TokenDelta("a", 0, [2]), TokenDelta("b", 0, [5])]) == []
    buffer.forget("b")
    last = TokenDelta("a", 0, [3], finish_reason="stop")
    assert buffer.merge([last]) == [TokenDelta("a", 0, [1, 2]), last]
    end = TokenDelta("b", 0, [6], finish_reason="stop")
    assert buffer.merge([end]) == [end]


def test_nothing_is_kept_of_an_aborted_request():
    async def check():
        core = FakeCore(gated=True)
        async with engine_on(core) as engine:
            task = asyncio.create_task(outputs_of(engine, fake_request("a", max_tokens=10_000)))
            core.allow(3)
            await asyncio.to_thread(wait_for, lambda: engine._buffer._held)
            task.cancel()

            def has_ended():
                core.allow()
                return not core.live()

            await asyncio.to_thread(wait_for, has_ended)
            core.allow(1000)
            await outputs_of(engine, fake_request("b"))
            assert not engine._buffer._held

    asyncio.run(check())
