"""`AsyncEngine`: an engine in this process for asyncio programs, behind the same socket as the engine of a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from rayllm.api.types import EngineInfo, EngineStats, GenerationRequest, RequestOutput
from rayllm.config.options import EngineConfig
from rayllm.engine.build import start_engine
from rayllm.engine.client import EngineClient
from rayllm.engine.driver import Core, EngineDriver
from rayllm.engine.socket import EngineSocket
from rayllm.text.tokenizer import Tokenizer, load_tokenizer


class AsyncEngine:
    """Runs requests on `core`, which it shuts down when it is closed. All methods are called from one event loop.

    tokenizer: None with skip_tokenizer_init; texts are "" then.
    """

    def __init__(self, core: Core, tokenizer: Tokenizer | None):
        self._driver = EngineDriver(core)
        self._driver.start()
        self._socket = EngineSocket(self._driver)
        self._client = EngineClient(self._socket.endpoint.ipc, tokenizer)
        self._connecting: asyncio.Task[None] | None = None

    @classmethod
    def from_config(cls, config: EngineConfig) -> AsyncEngine:
        """An engine with these options. Blocks while the model loads; raises ConfigError, ModelError, StartupError."""
        tokenizer = None if config.skip_tokenizer_init else load_tokenizer(config.model)
        return cls(start_engine(config), tokenizer)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, if there is one."""
        return self._client.tokenizer

    @property
    def info(self) -> EngineInfo:
        """The engine's limits."""
        return self._driver.info

    @property
    def dead(self) -> str | None:
        """Why the engine can't be used any more; None while it can."""
        return self._client.dead or self._driver.dead

    async def start(self) -> None:
        """Connect to the engine; `generate` does it where it was not done. Raises EngineDeadError."""
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._client.connect())
        await asyncio.shield(self._connecting)

    async def generate(
        self, request: GenerationRequest, prompt_text: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run a request, as `EngineClient.generate` does; what it raises comes before the first output."""
        await self.start()
        outputs = self._client.generate(request, prompt_text)
        try:
            async for output in outputs:
                yield output
        finally:
            await outputs.aclose()

    async def abort(self, request_id: str) -> None:
        """End a request, its iterator too, without a last output. Unknown ids are no error."""
        await self._client.abort(request_id)

    def stats(self) -> EngineStats:
        """The engine's figures after its last step."""
        return self._driver.stats()

    async def close(self) -> None:
        """Stop the engine. Streams end with EngineDeadError."""
        await self._client.close()
        try:
            await asyncio.to_thread(self._driver.shutdown)
        finally:
            await asyncio.to_thread(self._socket.close)
