"""A real engine that ends in the middle of requests of every kind: the next one goes on where it was, to the bit.

Where another one is there already: tests/benchmarks/test_kill_matrix.py.
"""

from __future__ import annotations

import asyncio

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


def test_requests_of_every_kind_go_on():
    async def scenario():
        lost, other = LiveEngine("one"), LiveEngine("two")
        calm = await connected([other])
        undisturbed = await outputs_of(calm, [0])
        await calm.close()
        front = await connected([lost])
        progress = [0]
        disturbed = asyncio.create_task(outputs_of(front, progress))
        await until(lambda: progress[0] > 60)
        await asyncio.to_thread(lost.close)
        await front.update([other.member], KEYS)
        for before, after in zip(undisturbed, await asyncio.wait_for(disturbed, 60), strict=True):
            assert after.outputs == before.outputs, before.request_id
            assert after.prompt_logprobs == before.prompt_logprobs
            assert after.embedding == before.embedding
        assert other.driver.stats.num_used_blocks == 0
        await front.close()
        other.close()

    asyncio.run(scenario())
