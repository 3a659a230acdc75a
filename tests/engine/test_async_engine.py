"""AsyncEngine over both clients, on a core that makes up tokens."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import types
from contextlib import aclosing, asynccontextmanager

import pytest
import tokenizers
from support.driver import INFO, FakeCore, fake_request, wait_for
from tokenizers import decoders, models, pre_tokenizers

from rayllm.api.sampling_params import SamplingParams
from rayllm.api.types import GenerationRequest
from rayllm.config.options import EngineConfig
from rayllm.engine.async_engine import AsyncEngine
from rayllm.engine.client import InProcessClient, ZmqClient
from rayllm.engine.driver import EngineDriver
from rayllm.errors import EngineDeadError, InvalidRequestError
from rayllm.text.outputs import accumulate
from rayllm.text.tokenizer import Tokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def make_tokenizer() -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(ALPHABET)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


TOKENIZER = make_tokenizer()
STORY = "Once upon a time there was a snowman \N{SNOWMAN}. STOP The end. " * 20


def tell_story(_request, index, position) -> int:
    """The core's tokens: the story, for completion i from character i."""
    return TOKENIZER.encode(STORY[index:])[position]


@asynccontextmanager
async def engine_on(core: FakeCore, kind: str = "zmq", tokenizer=TOKENIZER):
    driver = EngineDriver(core)
    driver.start()
    client = InProcessClient(driver, owns_driver=False) if kind == "local" else ZmqClient(driver.serve_zmq())
    engine = AsyncEngine(client, tokenizer)
    try:
        yield engine, driver
    finally:
        if core._gate is not None:
            core.allow(1000)
        await engine.close()
        await asyncio.to_thread(driver.shutdown, 5)


def both(test):
    """Run an async test with each client."""

    @pytest.mark.parametrize("kind", ["local", "zmq"])
    def run(kind):
        asyncio.run(asyncio.wait_for(test(kind), 30))

    return run


async def until(condition, timeout=10.0):
    end = asyncio.get_running_loop().time() + timeout
    while not condition():
        assert asyncio.get_running_loop().time() < end, "it did not happen in time"
        await asyncio.sleep(0.002)


async def stepping_until(core, condition):
    """Let the engine step on, as what was sent to it is taken in between steps."""
    await until(lambda: condition() or core.allow())


async def whole(stream):
    total = None
    async for output in stream:
        total = accumulate(total, output)
    return total


@both
async def test_many_requests_at_once(kind):
    async with engine_on(FakeCore(tell_story), kind) as (engine, driver):
        requests = [fake_request(f"r{i}", max_tokens=20 + i) for i in range(20)]
        totals = await asyncio.gather(*(whole(engine.generate(r, "Tell!")) for r in requests))
        for request, total in zip(requests, totals, strict=True):
            (completion,) = total.outputs
            assert total.request_id == request.request_id
            assert total.prompt == "Tell!"
            ids = TOKENIZER.encode(STORY)[: request.params.max_tokens]
            assert (completion.text, completion.token_ids) == (TOKENIZER.decode(ids), ids)
            assert completion.finish_reason == "length"
            assert total.finished
        assert engine.info == INFO
        assert engine.tokenizer is TOKENIZER
        wait_for(lambda: driver.stats().num_running == 0)
        assert (await engine.stats()).num_steps >= 39
        assert (len(engine._processor), engine._streams) == (0, {})


@both
async def test_a_fast_consumer_gets_each_step(kind):
    core = FakeCore(tell_story, gated=True)
    async with engine_on(core, kind) as (engine, _):
        texts = []
        core.allow()
        async for output in engine.generate(fake_request("r", max_tokens=5)):
            texts.append(output.outputs[0].text)
            core.allow()
        assert texts == list(STORY[:5])


@both
async def test_a_slow_consumer_gets_several_steps_in_one_output(kind):
    core = FakeCore(tell_story, gated=True)
    async with engine_on(core, kind) as (engine, driver):
        stream = engine.generate(fake_request("r", max_tokens=400))
        core.allow()
        first = await anext(stream)
        core.allow(398)
        await until(lambda: driver.stats().num_steps == 399)
        await until(lambda: not engine._inbox)
        await asyncio.sleep(0.05)
        second = await anext(stream)
        assert len(second.outputs[0].token_ids) > 300
        core.allow()
        total = accumulate(accumulate(None, first), second)
        async for output in stream:
            total = accumulate(total, output)
        ids = TOKENIZER.encode(STORY)[:400]
        assert total.outputs[0].token_ids == ids
        assert total.outputs[0].text == TOKENIZER.decode(ids)


@both
async def test_stop_strings_abort_in_the_engine(kind):
    core = FakeCore(tell_story, gated=True)
    async with engine_on(core, kind) as (engine, _):
        task = asyncio.create_task(whole(engine.generate(fake_request("r", max_tokens=900, stop=["STOP"]))))
        await stepping_until(core, task.done)
        total = task.result()
        assert total.outputs[0].text == STORY[: STORY.index("STOP")]
        assert total.outputs[0].stop_reason == "STOP"
        await stepping_until(core, lambda: ("abort", "r") in core.calls)
        assert core.live() == []


@both
async def test_several_completions(kind):
    async with engine_on(FakeCore(tell_story), kind) as (engine, _):
        total = await whole(engine.generate(fake_request("r", max_tokens=30, n=3, temperature=1.0, stop=["h"])))
        assert [(o.index, o.text, o.finish_reason) for o in total.outputs] == [
            (i, STORY[i : STORY.index("h")], "stop") for i in range(3)
        ]


@both
async def test_leaving_aborts(kind):
    core = FakeCore(tell_story, gated=True)
    async with engine_on(core, kind) as (engine, _):
        for leave in ("aclose", "cancel", "drop"):
            request = fake_request(leave, max_tokens=900)
            stream = engine.generate(request)
            core.allow()
            if leave == "cancel":
                task = asyncio.create_task(whole(stream))
                await until(lambda: "cancel" in engine._streams)
                await asyncio.sleep(0.01)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            else:
                await anext(stream)
                if leave == "aclose":
                    await stream.aclose()
                del stream
                gc.collect()
                await asyncio.sleep(0)
            await until(lambda name=leave: name not in engine._streams)
            assert leave not in engine._processor
            await stepping_until(core, lambda name=leave: ("abort", name) in core.calls)


@both
async def test_a_finished_stream_that_is_closed_aborts_nothing(kind):
    core = FakeCore(tell_story)
    async with engine_on(core, kind) as (engine, _):
        async with aclosing(engine.generate(fake_request("r", max_tokens=2))) as stream:
            async for output in stream:
                if output.finished:
                    break
        await engine.stats()
        assert not [call for call in core.calls if call[0] == "abort"]


@both
async def test_abort_by_id_ends_the_stream(kind):
    core = FakeCore(tell_story, gated=True)
    async with engine_on(core, kind) as (engine, _):
        stream = engine.generate(fake_request("r", max_tokens=900))
        core.allow()
        await anext(stream)
        waiting = asyncio.create_task(anext(stream, "over"))
        await asyncio.sleep(0)
        await engine.abort("r")
        await engine.abort("unknown")
        assert await waiting == "over"
        await stepping_until(core, lambda: ("abort", "r") in core.calls)
        again = engine.generate(fake_request("r", max_tokens=1))  # the id is free
        core.allow(3)
        assert (await whole(again)).finished


@both
async def test_the_engines_death_in_mid_stream(kind):
    core = FakeCore(tell_story, gated=True)
    async with engine_on(core, kind) as (engine, _):
        streams = [engine.generate(fake_request(f"r{i}", max_tokens=900)) for i in range(2)]
        core.allow()
        first = asyncio.create_task(anext(streams[1]))
        await anext(streams[0])
        core.crash = RuntimeError("GPU lost")
        core.allow(2)
        with pytest.raises(EngineDeadError, match="GPU lost"):
            await whole(streams[0])
        await asyncio.wait([first])
        with pytest.raises(EngineDeadError, match="GPU lost"):  # it may have got the first step
            await (first if first.exception() else anext(streams[1]))
        assert "GPU lost" in engine.dead
        with pytest.raises(EngineDeadError, match="GPU lost"):
            engine.generate(fake_request("late"))
        assert (len(engine._processor), engine._streams) == (0, {})


@both
async def test_what_came_before_the_death_is_still_delivered(kind):
    core = FakeCore(tell_story, gated=True)
    async with engine_on(core, kind) as (engine, driver):
        stream = engine.generate(fake_request("r", max_tokens=900))
        core.allow(1)
        text = (await anext(stream)).outputs[0].text
        core.allow(3)
        await until(lambda: driver.stats().num_steps == 4)
        core.crash = RuntimeError()
        core.allow()
        await until(lambda: engine.dead)
        text += (await anext(stream)).outputs[0].text
        assert text == STORY[:4]
        with pytest.raises(EngineDeadError):
            await anext(stream)


@both
async def test_refusals(kind):
    core = FakeCore(tell_story, gated=True)
    async with engine_on(core, kind) as (engine, _):
        bad = GenerationRequest(request_id="bad", prompt_token_ids=[10**6], params=SamplingParams())
        with pytest.raises(InvalidRequestError, match="token id 1000000"):
            await anext(engine.generate(bad))  # not started yet: the first step raises
        with pytest.raises(InvalidRequestError, match="token id 1000000"):
            engine.generate(bad)  # started: at once
        stream = engine.generate(fake_request("r", max_tokens=900))
        core.allow()
        await anext(stream)
        with pytest.raises(InvalidRequestError, match="in use"):
            engine.generate(fake_request("r"))
        core.allow()
        assert (await anext(stream)).request_id == "r", "the other one goes on"
        await stream.aclose()
        task = asyncio.create_task(whole(engine.generate(fake_request("refused"))))
        await stepping_until(core, task.done)
        total = task.result()
        assert (total.outputs[0].finish_reason, total.outputs[0].stop_reason) == ("error", "the core does not like it")
        assert "bad" not in [name for _, *names in core.calls for name in names]


@both
async def test_without_a_tokenizer(kind):
    async with engine_on(FakeCore(), kind, tokenizer=None) as (engine, _):
        total = await whole(engine.generate(fake_request("r", max_tokens=3)))
        assert (total.outputs[0].text, total.outputs[0].token_ids) == ("", [3, 4, 5])
        with pytest.raises(InvalidRequestError, match="skip_tokenizer_init"):
            engine.generate(fake_request("q", stop=["x"]))


@both
async def test_close_ends_streams(kind):
    core = FakeCore(tell_story, gated=True)
    async with engine_on(core, kind) as (engine, _):
        stream = engine.generate(fake_request("r", max_tokens=900))
        core.allow()
        await anext(stream)
        waiting = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(EngineDeadError, match="closed"):
            await waiting
        await stepping_until(core, lambda: ("abort", "r") in core.calls)
        with pytest.raises(EngineDeadError, match="closed"):
            engine.generate(fake_request("late"))


@both
async def test_a_blocked_event_loop_catches_up_with_one_wake_up(kind):
    core = FakeCore(tell_story, gated=True)
    async with engine_on(core, kind) as (engine, driver):
        stream = engine.generate(fake_request("r", max_tokens=300))
        core.allow()
        await anext(stream)
        core.allow(299)
        wait_for(lambda: driver.stats().num_steps == 300)  # blocks the loop
        if kind == "local":
            assert len(engine._inbox) >= 298
        rest = [output async for output in stream]
        assert sum(len(o.outputs[0].token_ids) for o in rest) == 299
        if kind == "local":
            assert len(rest) <= 2


def test_start_fails_without_an_engine(tmp_path):
    async def main():
        engine = AsyncEngine(ZmqClient(f"ipc://{tmp_path}/none", silence_s=0.05), TOKENIZER)
        with pytest.raises(EngineDeadError, match="no engine answers"):
            await engine.start()
        with pytest.raises(EngineDeadError):
            await anext(engine.generate(fake_request("r")))
        await engine.close()

    asyncio.run(main())


def test_from_config(monkeypatch):
    core = FakeCore()
    module = types.ModuleType("rayllm.engine.engine")
    module.build_engine_core = lambda config: core if config.seed == 5 else None
    monkeypatch.setitem(sys.modules, "rayllm.engine.engine", module)

    async def main():
        engine = AsyncEngine.from_config(EngineConfig(seed=5, skip_tokenizer_init=True))
        assert engine.tokenizer is None
        assert engine.info == INFO
        assert (await whole(engine.generate(fake_request("r", max_tokens=3)))).outputs[0].token_ids == [3, 4, 5]
        await engine.close()
        assert core.calls[-1] == ("shutdown",)
        assert not [t for t in threading.enumerate() if t.name == "rayllm-engine"]

    asyncio.run(main())
