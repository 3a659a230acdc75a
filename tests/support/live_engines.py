"""Real engines of the bundled model that listen, and fronts that use them; no tests here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from support.driver import until
from support.launched import BUNDLED
from support.request_kinds import requests_of_every_kind
from support.serve import KEYS

from rayllm.api.types import GenerationRequest, RequestOutput
from rayllm.config.options import EngineConfig
from rayllm.engine.build import start_engine
from rayllm.engine.driver import EngineDriver
from rayllm.engine.socket import EngineSocket
from rayllm.serve.cluster.directory import EngineMember
from rayllm.serve.cluster.front import FrontModel, ModelFront
from rayllm.text.outputs import accumulate
from rayllm.text.tokenizer import load_tokenizer


class LiveEngine:
    """An engine that listens, as a replica has it."""

    def __init__(self, name: str):
        options = {"max_num_batched_tokens": 64, "num_gpu_blocks_override": 200, "deterministic": True}
        self.driver = EngineDriver(start_engine(EngineConfig(model=str(BUNDLED), device="cpu", **options)))
        self.socket = EngineSocket(self.driver)
        self.member = EngineMember(name, "m", 0, "here", self.socket.endpoint)

    def close(self) -> None:
        self.driver.shutdown()
        self.socket.close()


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
