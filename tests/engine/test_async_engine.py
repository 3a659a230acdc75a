"""AsyncEngine and the streams of its client, on a core that makes up tokens."""

from __future__ import annotations

import asyncio
import gc
import threading
from contextlib import aclosing, asynccontextmanager

import pytest
import tokenizers
from support.driver import INFO, FakeCore, fake_request, until, wait_for, whole
from support.engine import fake_core
from tokenizers import decoders, models, pre_tokenizers

from rayllm.api.sampling_params import SamplingParams
from rayllm.api.types import GenerationRequest
from rayllm.config.options import EngineConfig
from rayllm.engine import async_engine
from rayllm.engine.async_engine import AsyncEngine
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
async def engine_on(core: FakeCore, tokenizer=TOKENIZER):
    engine = AsyncEngine(core, tokenizer)
    try:
        yield engine
    finally:
        if getattr(core, "gated", False):
            core.allow(1000)
        await engine.close()


def in_a_loop(test):
    """Run an async test."""

    def run():
        asyncio.run(asyncio.wait_for(test(), 30))

    return run


async def stepping_until(core, condition):
    """Let the engine step on, as what was sent to it is taken in between steps."""
    await until(lambda: condition() or core.allow())


async def drawn_tokens(**options) -> list[tuple[int, ...]]:
    """What a new engine makes of five equal requests without a seed, two completions each."""
    core, _ = fake_core(**options)
    async with engine_on(core, None) as engine:
        requests = [fake_request(f"r{i}", max_tokens=12, n=2, ignore_eos=True) for i in range(5)]
        totals = await asyncio.gather(*(whole(engine.generate(request)) for request in requests))
    return [tuple(completion.token_ids) for total in totals for completion in total.outputs]


@in_a_loop
async def test_without_a_seed_no_noise_comes_twice():
    """Neither in one engine, nor in another or after a new start."""
    assert len({*await drawn_tokens(), *await drawn_tokens()}) == 20


@in_a_loop
async def test_with_a_seed_of_the_engine_every_start_repeats_the_noise_of_the_last():
    first = await drawn_tokens(seed=3)
    assert first == await drawn_tokens(seed=3)
    assert len({*first, *await drawn_tokens(seed=4)}) == 20


@in_a_loop
async def test_many_requests_at_once():
    async with engine_on(FakeCore(tell_story)) as engine:
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
        await until(lambda: engine.stats().num_running == 0)
        assert engine.stats().num_steps >= 39
        assert (await whole(engine.generate(requests[0]))).finished, "its id is free"


@in_a_loop
async def test_a_fast_consumer_gets_each_step():
    core = FakeCore(tell_story, gated=True)
    async with engine_on(core) as engine:
        texts = []
        core.allow()
        async for output in engine.generate(fake_request("r", max_tokens=5)):
            texts.append(output.outputs[0].text)
            core.allow()
        assert texts == list(STORY[:5])


@in_a_loop
async def test_a_slow_consumer_gets_several_steps_in_one_output():
    core = FakeCore(tell_story, gated=True)
    async with engine_on(core) as engine:
        stream = engine.generate(fake_request("r", max_tokens=401))
        core.allow()
        first = await anext(stream)
        core.allow(400)
        await until(lambda: engine.stats().num_steps >= 401)
        last = asyncio.create_task(whole(engine.generate(fake_request("last", max_tokens=1))))
        await stepping_until(core, last.done)  # its token comes after the stream's 401st
        second = await anext(stream)
        assert (len(second.outputs[0].token_ids), second.finished) == (400, True)
        total = accumulate(accumulate(None, first), second)
        ids = TOKENIZER.encode(STORY)[:401]
        assert total.outputs[0].token_ids == ids
        assert total.outputs[0].text == TOKENIZER.decode(ids)
        assert [output async for output in stream] == []


@in_a_loop
async def test_stop_strings_abort_in_the_engine():
    core = FakeCore(tell_story, gated=True)
    async with engine_on(core) as engine:
        task = asyncio.create_task(whole(engine.generate(fake_request("r", max_tokens=900, stop=["STOP"]))))
        await stepping_until(core, task.done)
        total = task.result()
        assert total.outputs[0].text == STORY[: STORY.index("STOP")]
        assert total.outputs[0].stop_reason == "STOP"
        await stepping_until(core, lambda: ("abort", "r") in core.calls)
        assert core.live() == []


@in_a_loop
async def test_several_completions():
    async with engine_on(FakeCore(tell_story)) as engine:
        total = await whole(engine.generate(fake_request("r", max_tokens=30, n=3, temperature=1.0, stop=["h"])))
        assert [(o.index, o.text, o.finish_reason) for o in total.outputs] == [
            (i, STORY[i : STORY.index("h")], "stop") for i in range(3)
        ]


@in_a_loop
async def test_leaving_aborts():
    core = FakeCore(tell_story, gated=True)
    async with engine_on(core) as engine:
        for leave in ("aclose", "cancel", "drop"):
            request = fake_request(leave, max_tokens=900)
            stream = engine.generate(request)
            core.allow()
            if leave == "cancel":
                task = asyncio.create_task(whole(stream))
                await until(lambda: "cancel" in core.live())
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
            await stepping_until(core, lambda name=leave: ("abort", name) in core.calls)
            again = asyncio.create_task(whole(engine.generate(fake_request(leave, max_tokens=1))))  # the id is free
            await stepping_until(core, again.done)
            assert again.result().finished


@in_a_loop
async def test_a_finished_stream_that_is_closed_aborts_nothing():
    core = FakeCore(tell_story)
    async with engine_on(core) as engine:
        async with aclosing(engine.generate(fake_request("r", max_tokens=2))) as stream:
            async for output in stream:
                if output.finished:
                    break
        await whole(engine.generate(fake_request("next", max_tokens=1)))  # an abort would have come before it
        assert not [call for call in core.calls if call[0] == "abort"]


@in_a_loop
async def test_abort_by_id_ends_the_stream():
    core = FakeCore(tell_story, gated=True)
    async with engine_on(core) as engine:
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


@in_a_loop
async def test_the_engines_death_in_mid_stream():
    core = FakeCore(tell_story, gated=True)
    async with engine_on(core) as engine:
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
            await anext(engine.generate(fake_request("late")))


@in_a_loop
async def test_what_came_before_the_death_is_still_delivered():
    core = FakeCore(tell_story, gated=True)
    async with engine_on(core) as engine:
        stream = engine.generate(fake_request("r", max_tokens=900))
        core.allow(1)
        text = (await anext(stream)).outputs[0].text
        core.allow(3)
        await until(lambda: engine.stats().num_steps == 4)
        core.crash = RuntimeError()
        core.allow()
        await until(lambda: engine.dead)
        text += (await anext(stream)).outputs[0].text
        assert text == STORY[:4]
        with pytest.raises(EngineDeadError):
            await anext(stream)


@in_a_loop
async def test_refusals():
    core = FakeCore(tell_story, gated=True)
    async with engine_on(core) as engine:
        bad = GenerationRequest(request_id="bad", prompt_token_ids=[10**6], params=SamplingParams())
        for _ in range(2):  # also by the generate that connects
            with pytest.raises(InvalidRequestError, match="token id 1000000"):
                await anext(engine.generate(bad))
        stream = engine.generate(fake_request("r", max_tokens=900))
        core.allow()
        await anext(stream)
        with pytest.raises(InvalidRequestError, match="in use"):
            await anext(engine.generate(fake_request("r")))
        core.allow()
        assert (await anext(stream)).request_id == "r", "the other one goes on"
        await stream.aclose()
        for name in ("refused", "broken") * 2:  # their ids are free again
            task = asyncio.create_task(whole(engine.generate(fake_request(name))))
            await stepping_until(core, task.done)
            if name == "refused":
                with pytest.raises(InvalidRequestError, match="the core does not like it") as caught:
                    await task
                assert caught.value.param == "prompt"
            else:
                (failed,) = task.result().outputs
                assert failed.finish_reason == "error"
                assert "a bug" in failed.stop_reason
        assert "bad" not in [name for _, *names in core.calls for name in names]


@in_a_loop
async def test_without_a_tokenizer():
    async with engine_on(FakeCore(), tokenizer=None) as engine:
        total = await whole(engine.generate(fake_request("r", max_tokens=3)))
        assert (total.outputs[0].text, total.outputs[0].token_ids) == ("", [3, 4, 5])
        with pytest.raises(InvalidRequestError, match="skip_tokenizer_init"):
            await anext(engine.generate(fake_request("q", stop=["x"])))


@in_a_loop
async def test_close_ends_streams_and_the_engine():
    core = FakeCore(tell_story, gated=True)
    async with engine_on(core) as engine:
        stream = engine.generate(fake_request("r", max_tokens=900))
        core.allow()
        await anext(stream)
        waiting = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        closing = asyncio.create_task(engine.close())
        with pytest.raises(EngineDeadError, match="closed"):
            await waiting
        await stepping_until(core, closing.done)
        await closing
        assert core.calls[-1] == ("shutdown",)
        assert "closed" in engine.dead
        with pytest.raises(EngineDeadError, match="closed"):
            await anext(engine.generate(fake_request("late")))
        await engine.close()
        assert core.calls[-1] == ("shutdown",)
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("rayllm-")]


@in_a_loop
async def test_an_engine_that_was_never_used_can_be_closed():
    core = FakeCore()
    async with engine_on(core) as engine:
        assert engine.info == INFO
        await engine.close()
        assert core.calls == [("shutdown",)]
        with pytest.raises(EngineDeadError, match="closed"):
            await anext(engine.generate(fake_request("late")))


@in_a_loop
async def test_an_engine_that_is_closed_while_it_is_being_connected():
    async with engine_on(FakeCore()) as engine:
        first = asyncio.create_task(anext(engine.generate(fake_request("r"))))
        await asyncio.sleep(0)  # it waits for the welcome now
        await engine.close()
        with pytest.raises(EngineDeadError):
            await first


@in_a_loop
async def test_a_core_that_does_not_shut_down_cleanly_leaves_no_socket():
    class Stuck(FakeCore):
        def shutdown(self):
            raise OSError("the worker does not end")

    engine = AsyncEngine(Stuck(), None)
    await engine.start()
    with pytest.raises(OSError, match="does not end"):
        await engine.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rayllm-")]


@in_a_loop
async def test_an_engine_connects_once():
    async with engine_on(FakeCore()) as engine:
        await asyncio.gather(engine.start(), engine.start(), whole(engine.generate(fake_request("r"))))
        await engine.start()
        assert engine.driver.num_fronts == 1
        assert engine.dead is None


@in_a_loop
async def test_a_blocked_event_loop_catches_up():
    core = FakeCore(tell_story, gated=True)
    async with engine_on(core) as engine:
        stream = engine.generate(fake_request("r", max_tokens=300))
        core.allow()
        await anext(stream)
        core.allow(299)
        wait_for(lambda: engine.stats().num_steps == 300)  # blocks the loop
        rest = [output async for output in stream]
        assert sum(len(output.outputs[0].token_ids) for output in rest) == 299
        assert len(rest) < 100, "most steps come merged"


def test_from_config(monkeypatch):
    core = FakeCore()
    monkeypatch.setattr(async_engine, "start_engine", lambda options: core if options.seed == 5 else None)

    async def main():
        engine = AsyncEngine.from_config(EngineConfig(seed=5, skip_tokenizer_init=True))
        assert engine.tokenizer is None
        assert engine.info == INFO
        assert (await whole(engine.generate(fake_request("r", max_tokens=3)))).outputs[0].token_ids == [3, 4, 5]
        await engine.close()
        assert core.calls[-1] == ("shutdown",)
        assert not [thread for thread in threading.enumerate() if thread.name == "rayllm-engine"]

    asyncio.run(main())
