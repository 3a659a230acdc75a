"""Requests relayed to an engine on another node."""

import asyncio

import pytest
from support.serve import INFO, FakeHandle, until

from rayllm.api.types import GenerationRequest, SamplingParams, TokenDelta
from rayllm.errors import EngineDeadError
from rayllm.serve.cluster.relay import RelayClient, RelayFront

REQUEST = GenerationRequest(request_id="r", prompt_token_ids=[1], params=SamplingParams(n=2))


def relay_client(scenario):
    """Run scenario(client, handle, deltas) against a fake handle."""

    async def run():
        handle, deltas = FakeHandle(), []
        client = RelayClient(handle, "one", INFO)
        await client.start(deltas.extend, lambda _: None)
        await scenario(client, handle, deltas)
        await client.close()

    asyncio.run(run())


def test_relayed_requests_come_back_as_deltas():
    async def scenario(client, _handle, deltas):
        assert client.info() == INFO
        client.add(REQUEST)
        await until(lambda: len(deltas) == 2)
        assert [d.token_ids for d in deltas] == [[5], [6]]
        assert (await client.stats()).num_running == 3

    relay_client(scenario)


def test_aborting_a_relayed_request_cancels_the_call():
    async def scenario(client, handle, deltas):
        client.add(GenerationRequest(request_id="slow", prompt_token_ids=[1], params=SamplingParams()))
        await until(lambda: deltas)
        client.abort(["slow", "unknown"])
        await until(lambda: handle.cancelled == 1)

    relay_client(scenario)


def test_a_broken_relay_ends_every_completion():
    async def scenario(client, _handle, deltas):
        client.add(GenerationRequest(request_id="broken", prompt_token_ids=[1], params=SamplingParams(n=2)))
        await until(lambda: len(deltas) == 3)
        assert [(d.index, d.finish_reason) for d in deltas[1:]] == [(0, "error"), (1, "error")]

    relay_client(scenario)


class FakeDriver:
    def __init__(self):
        self.front = None
        self.detached = False

    def attach(self, front):
        self.front = front

    def detach(self, front):
        assert front is self.front
        self.detached = True

    def add(self, front, request):
        front.deliver([TokenDelta(request.request_id, 0, [7], finish_reason="stop")])
        if request.request_id == "dies":
            front.dead("out of memory")
        else:
            front.deliver([TokenDelta(request.request_id, 1, [8], finish_reason="stop")])


def test_relay_front_ends_with_the_last_completion():
    driver = FakeDriver()

    async def run():
        return [d.token_ids async for deltas in RelayFront(driver).run(REQUEST) for d in deltas]

    assert asyncio.run(run()) == [[7], [8]]
    assert driver.detached


def test_relay_front_passes_the_engines_death_on():
    driver = FakeDriver()
    request = GenerationRequest(request_id="dies", prompt_token_ids=[1], params=SamplingParams(n=2))

    async def run():
        async for _ in RelayFront(driver).run(request):
            pass

    with pytest.raises(EngineDeadError, match="out of memory"):
        asyncio.run(run())
    assert driver.detached
