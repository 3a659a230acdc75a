"""Real engines of the bundled model that listen, and fronts that use them; no tests here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from support.driver import until
from support.launched import BUNDLED
from support.request_kinds import requests_of_every_kind
from support.serve import KEYS, LocalDirectory, place

from rayllm.api.types import GenerationRequest, RequestOutput
from rayllm.config.options import EngineConfig
from rayllm.config.resolved import resolve
from rayllm.engine.build import start_engine
from rayllm.engine.driver import EngineDriver
from rayllm.engine.socket import EngineSocket
from rayllm.serve.cluster.directory import EngineMember
from rayllm.serve.cluster.front import FrontModel, ModelFront
from rayllm.serve.cluster.replica import EngineReplica
from rayllm.text.outputs import accumulate
from rayllm.text.tokenizer import load_tokenizer

CONFIG = EngineConfig(
    model=str(BUNDLED), device="cpu", max_num_batched_tokens=64, num_gpu_blocks_override=200, deterministic=True
)


class LiveEngine:
    """An engine that listens, as a replica has it."""

    def __init__(self, name: str):
        self.driver = EngineDriver(start_engine(CONFIG))
        self.socket = EngineSocket(self.driver)
        self.member = EngineMember(name, "m", 0, "here", self.socket.endpoint)

    def drain(self) -> None:
        """Say that it is about to end."""
        self.socket.drain()
        time.sleep(0.1)  # for fronts to hear it

    def close(self) -> None:
        self.driver.shutdown()
        self.socket.close()


async def live_replica(name: str, directory: LocalDirectory, drain_timeout: float) -> EngineReplica:
    """What Serve runs, with a real engine."""
    replica = EngineReplica.__new__(EngineReplica)
    config = resolve(CONFIG, 0)
    await replica.__init__(config, "m", drain_timeout, place=place(name), registry=directory)  # type: ignore[misc]
    return replica


async def connected(engines: list[LiveEngine], name: str = "me") -> ModelFront:
    """A front that uses these engines."""
    return await connected_to([engine.member for engine in engines], name)


async def connected_to(members: list[EngineMember], name: str) -> ModelFront:
    """As `connected`, also in another process than the engines'."""
    front = ModelFront(FrontModel(name="m", folder=""), load_tokenizer(BUNDLED), name, "here")
    await front.update(members, KEYS)
    await until(lambda: front.num_replicas == len(members))
    return front


async def outputs_of_every_kind(
    front: ModelFront,
    progress: list[int],
    change: Callable[[GenerationRequest], GenerationRequest] = lambda request: request,
) -> list[RequestOutput]:
    """Of requests of every kind, run at once. progress: its only number grows with each output."""

    async def run(request: GenerationRequest) -> RequestOutput:
        total = None
        async for output in front.generate(change(request)):
            total = accumulate(total, output)
            progress[0] += 1
        assert total is not None
        return total

    return await asyncio.gather(*(run(request) for request in requests_of_every_kind(front.tokenizer)))
