"""`AsyncEngine`: an engine in this process for asyncio programs, behind the same socket as the engine of a server."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

from rayllm.api.types import EngineStats, GenerationRequest, RequestOutput
from rayllm.config.options import EngineConfig
from rayllm.engine.build import start_engine
from rayllm.engine.client import EngineClient
from rayllm.engine.driver import Core, EngineDriver, start_core
from rayllm.engine.socket import EngineSocket
from rayllm.hub import local_engine
from rayllm.text.tokenizer import Tokenizer, load_tokenizer


class AsyncEngine(EngineClient):
    """A client that owns its engine: it runs `core`, and shuts it down when it is closed.

    All methods are called from one event loop. tokenizer: None with skip_tokenizer_init; texts are "" then.
    """

    def __init__(self, core: Core, tokenizer: Tokenizer | None):
        self.driver = EngineDriver(core)
        self._server = EngineSocket(self.driver)
        super().__init__(self._server.endpoint.ipc, tokenizer)
        self._info = core.info
        self._numbers = itertools.count(1)
        self._connecting: asyncio.Task[None] | None = None

    @classmethod
    def from_config(cls, config: EngineConfig) -> AsyncEngine:
        """An engine with these options. Blocks while the model loads; raises ConfigError, ModelError, StartupError."""
        config = local_engine(config)
        tokenizer = None if config.skip_tokenizer_init else load_tokenizer(config.model)
        return cls(start_core(partial(start_engine, config)), tokenizer)

    async def start(self) -> None:
        """Connect to the engine; `generate` does it where it was not done. Raises EngineDeadError."""
        if self._connecting is None:
            self._connecting = asyncio.create_task(self.connect())
        await asyncio.shield(self._connecting)

    async def generate(
        self, request: GenerationRequest, prompt_text: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run a request, as `EngineClient.generate` does; what it raises comes before the first output."""
        request = request.numbered(next(self._numbers), self.info.seed)
        await self.start()
        async with aclosing(super().generate(request, prompt_text)) as outputs:
            async for output in outputs:
                yield output

    def stats(self) -> EngineStats:
        """The engine's figures after its last step."""
        return self.driver.stats

    async def close(self) -> None:
        """Stop the engine. Streams end with EngineDeadError."""
        await super().close()
        try:
            await asyncio.to_thread(self.driver.shutdown)
        finally:
            await asyncio.to_thread(self._server.close)
