"""Real engines that end in the middle of requests of every kind: another one goes on where they were, to the bit."""

from __future__ import annotations

import asyncio

import pytest
from support.driver import until
from support.live_engines import LiveEngine, connected, outputs_of_every_kind
from support.serve import KEYS


@pytest.mark.parametrize("is_there", [True, False], ids=["another engine is there", "another engine comes"])
def test_requests_of_every_kind_go_on(is_there):
    async def scenario():
        lost, other = LiveEngine("one"), LiveEngine("two")
        calm = await connected([other])
        undisturbed = await outputs_of_every_kind(calm, [0])
        await calm.close()
        front = await connected([lost, other] if is_there else [lost])
        progress = [0]
        disturbed = asyncio.create_task(outputs_of_every_kind(front, progress))
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
