"""The network between an API server and an engine is gone for a moment: nobody dies, and no connection is ended."""

from __future__ import annotations

import asyncio

import zmq
from support.driver import FakeCore, fake_request, fake_tokens, running, until, whole

from rayllm.api.wire import CurveKeys, Endpoint
from rayllm.engine.socket import EngineSocket
from rayllm.serve.cluster.directory import EngineMember
from rayllm.serve.cluster.front import FrontModel, ModelFront


class Resuming(FakeCore):
    """Goes on where another engine was, as EngineCore does."""

    def add(self, request):
        super().add(request)
        if request.emitted is not None and request.request_id in self._live:
            self._live[request.request_id] = (request, len(request.emitted[0]))


class Network:
    """TCP connections to a port; of those that were `cut` nothing comes through any more, their ends neither."""

    def __init__(self, port):
        self.port, self.number, self.cut = port, 0, 0

    async def listen(self):
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        return server.sockets[0].getsockname()[1]

    async def _connect(self, reader, writer):
        self.number += 1
        number, (from_engine, to_engine) = self.number, await asyncio.open_connection("127.0.0.1", self.port)

        async def copy(source, target):
            while data := await source.read(65536):
                if number > self.cut:
                    target.write(data)
            if number > self.cut:
                target.close()

        await asyncio.gather(copy(reader, to_engine), copy(from_engine, writer))


def test_a_stream_goes_on_when_the_network_is_back():
    async def check():
        core = Resuming(gated=True)
        keys = CurveKeys(*(each.decode() for each in zmq.curve_keypair()))
        with running(core, fronts=0) as (driver,):
            server = EngineSocket(driver)
            server.open_tcp("127.0.0.1")
            server.allow([keys.public])
            network = Network(int(server.endpoint.tcp.rpartition(":")[2]))
            address = f"tcp://127.0.0.1:{await network.listen()}"
            endpoint = Endpoint(server.endpoint.ipc, address, server.endpoint.public_key)
            member = EngineMember("one", "m", 0, "elsewhere", endpoint)
            front = ModelFront(FrontModel(name="m", folder=""), None, "me", "here")
            await front.update([member], keys)
            await until(lambda: front.num_replicas == 1)
            request = fake_request("r", max_tokens=6)
            task = asyncio.create_task(whole(front.generate(request)))
            await until(core.live)
            core.allow(2)
            await asyncio.sleep(0.3)
            network.cut = network.number
            await until(lambda: front.num_replicas == 0, 20)
            for _ in range(40):
                await front.update([member], keys)  # as the directory's view does, again and again
                core.allow(1)
                await asyncio.sleep(0.25)
                if task.done():
                    break
            total = await asyncio.wait_for(task, 20)
            assert total.outputs[0].token_ids == fake_tokens(request)
            await front.close()
            core.allow(1000)
            server.close()

    asyncio.run(check())
