"""Real engines that end in the middle of requests of every kind: another one goes on where they were, to the bit."""

from __future__ import annotations

import asyncio

import pytest
from support.driver import until
from support.live_engines import LiveEngine, connected
from support.request_kinds import requests_of_every_kind
from support.serve import KEYS

from rayllm.api.types import RequestOutput
from rayllm.serve.cluster.front import ModelFront
from rayllm.text.outputs import accumulate


async def outputs_of(front: ModelFront, progress: list[int]) -> list[RequestOutput]:
    """Of requests of every kind, run at once. progress: its only number grows with each output."""

    async def run(request) -> RequestOutput:
        total = None
        async for output in front.generate(request):
            total = accumulate(total, output)
            progress[0] += 1
        return total

    return await asyncio.gather(*(run(request) for request in requests_of_every_kind(front.tokenizer)))


@pytest.mark.parametrize("is_there", [True, False], ids=["another engine is there", "another engine comes"])
def test_requests_of_every_kind_go_on(is_there):
    async def scenario():
        lost, other = LiveEngine("one"), LiveEngine("two")
        calm = await connected([other])
        undisturbed = await outputs_of(calm, [0])
        await calm.close()
        front = await connected([lost, other] if is_there else [lost])
        progress = [0]
        disturbed = asyncio.create_task(outputs_of(front, progress))
        await until(lambda: progress[0] > 60)
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
