"""Real engines that end in the middle of requests of every kind: another one goes on where they were, to the bit."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from support.driver import until
from support.live_engines import LiveEngine, connected, connected_to, live_replica, outputs_of_every_kind
from support.serve import KEYS, LocalDirectory


@pytest.mark.parametrize(
    ("is_there", "drains"),
    [(True, False), (False, False), (False, True)],
    ids=["another engine is there", "another engine comes", "it was to end, and another engine comes"],
)
def test_requests_of_every_kind_go_on(is_there, drains):
    async def scenario():
        lost, other = LiveEngine("one"), LiveEngine("two")
        calm = await connected([other])
        undisturbed = await outputs_of_every_kind(calm, [0])
        await calm.close()
        front = await connected([lost, other] if is_there else [lost])
        progress = [0]
        disturbed = asyncio.create_task(outputs_of_every_kind(front, progress))
        await until(lambda: progress[0] > 60)
        if drains:
            await asyncio.to_thread(lost.drain)
        await asyncio.to_thread(lost.close)
        if not is_there:
            await front.update([other.member], KEYS)
        for before, after in zip(undisturbed, await asyncio.wait_for(disturbed, 60), strict=True):
            assert after.outputs == before.outputs, before.request_id
            assert after.prompt_logprobs == before.prompt_logprobs
            assert after.embedding == before.embedding
        assert other.driver.stats.num_used_blocks == 0
        await front.close()
        other.close()

    asyncio.run(scenario())


def as_is(request):
    return request


def renamed(request):
    return msgspec.structs.replace(request, request_id=f"{request.request_id} again")


def test_a_rolling_replacement_under_requests_of_every_kind():
    """Two replicas that are told to stop, one after the other as soon as another is there, hand all requests on."""

    async def scenario():
        directory = LocalDirectory()
        replicas = {}
        for name in ("one", "two", "three", "four"):
            replicas[name] = await live_replica(name, directory, drain_timeout=0.1)
        members = {each.member_id: each for each in directory.ask().engines}
        front = await connected_to([members["one"], members["two"]], "me")
        undisturbed = await outputs_of_every_kind(front, [0])
        progress = [0]
        disturbed = [asyncio.create_task(outputs_of_every_kind(front, progress, copy)) for copy in (as_is, renamed)]
        for old, new in (("one", "three"), ("two", "four")):
            before = progress[0]
            await until(lambda before=before: progress[0] > before + 50)
            await front.update([members[new]], KEYS)
            await until(lambda: front.num_replicas == 3)
            await replicas[old].__del__()
            await front.update([], KEYS)
            assert (front.num_replicas, old in {each.member_id for each in directory.ask().engines}) == (2, False)
        for outputs in await asyncio.wait_for(asyncio.gather(*disturbed), 60):
            for before, after in zip(undisturbed, outputs, strict=True):
                assert after.outputs == before.outputs, before.request_id
                assert after.prompt_logprobs == before.prompt_logprobs
                assert after.embedding == before.embedding
        assert front.metrics.registry.get_sample_value("rayllm:request_resumed_total") > 4, "some moved twice"
        await front.close()
        for name in ("three", "four"):
            await replicas[name].__del__()

    asyncio.run(scenario())
