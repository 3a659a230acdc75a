"""The HTTP API over an engine in this process, without sockets, Ray or limits of what may wait: what batches ask."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial

from fastapi import FastAPI

from rayllm.api.types import EngineStats
from rayllm.batch.app_client import AppClient
from rayllm.batch.lines import BatchRequest
from rayllm.batch.runner import Ask
from rayllm.config.model_folder import load_model_spec
from rayllm.config.options import OFFLINE_BATCHED_TOKENS, ModelConfig, ServerConfig
from rayllm.engine.build import start_engine
from rayllm.engine.driver import SWITCH_S, Core, start_core
from rayllm.engine.folder import PrivateFolder
from rayllm.engine.whole_engine import WholeEngine
from rayllm.errors import EngineDeadError, InvalidRequestError
from rayllm.hub import local_model
from rayllm.serve.http.app import create_app
from rayllm.serve.http.jobs import Jobs
from rayllm.serve.http.limits import Admission
from rayllm.serve.http.metrics import FrontMetrics
from rayllm.serve.http.responses.store import ResponseStore
from rayllm.text.tokenizer import Tokenizer, load_tokenizer

_NO_LIMIT = 2**62
# Of a server with clients; whoever sends a batch waits for all of it.
_UNLIMITED = {"max_queued_requests": _NO_LIMIT, "max_queued_tokens": _NO_LIMIT} | dict.fromkeys(
    ("queue_timeout", "first_token_timeout", "request_timeout"), 0.0
)


class OfflineModel:
    """A `ServedModel`, and the `ServerState` of an app that serves nothing else. It owns the engine."""

    def __init__(self, model: ModelConfig, core: Core, tokenizer: Tokenizer | None):
        """tokenizer: None with skip_tokenizer_init. Made in an event loop."""
        self.name = model.name
        self.server: ServerConfig = model.server.model_copy(update=_UNLIMITED)
        self.metrics = FrontMetrics()
        self.admission = Admission(self.server, core.info.max_num_seqs)
        self._adapters = list(model.engine.adapters)
        self._engine = WholeEngine(core, tokenizer)
        self._folder = PrivateFolder()
        self.response_store, self.jobs = ResponseStore(self._folder.path), Jobs()

    @property
    def limit(self) -> int:
        """Requests that should be in flight, so that the engine never waits for the next."""
        return 2 * self._engine.info.max_num_seqs

    def app(self) -> FastAPI:
        """The HTTP app over this."""
        return create_app(self, self.server)

    def check(self) -> None:
        """Raise EngineDeadError if the engine has stopped."""
        if (reason := self._engine.stopped) is not None:
            raise EngineDeadError(reason)

    async def close(self) -> None:
        """Stop the engine."""
        await self.jobs.close()
        await self._engine.close()
        self._folder.remove()

    # ---- ServedModel

    def engine(self) -> WholeEngine:
        """The engine. Raises EngineDeadError if it has stopped."""
        self.check()
        return self._engine

    @property
    def num_replicas(self) -> int:
        return int(self._engine.stopped is None)

    async def unhealthy_reason(self) -> str | None:
        """Why the engine has stopped, if it has."""
        return self._engine.stopped

    def peer_metrics(self) -> list[dict[str, float]]:
        """There are no other servers."""
        return []

    @property
    def adapters(self) -> list[str]:
        """Those of the options."""
        return self._adapters

    async def load_adapter(self, name: str, path: str) -> None:
        """A batch has those of the options."""
        message = f"adapters of a batch come with the option lora_modules, as {name}={path}"
        raise InvalidRequestError(message, "lora_name")

    async def unload_adapter(self, name: str) -> None:
        """They stay."""
        raise InvalidRequestError(f"the adapter {name!r} stays while the batch runs", "lora_name")

    async def stats(self) -> Mapping[str, EngineStats]:
        """The figures of the engine."""
        return {"0": self._engine.stats()}

    # ---- ServerState

    @property
    def models(self) -> Mapping[str, OfflineModel]:
        """This one, by its name."""
        return {self.name: self}

    @property
    def door(self) -> Admission:
        return self.admission

    async def describe_cluster(self) -> list[str]:
        """Nothing, as there is no cluster."""
        return []

    async def cluster_json(self) -> bytes:
        """Nothing either."""
        return b"{}"


class LocalEngine:
    """The engine of a model in this process, with the defaults of offline use, and its API.

    Blocks while the model loads; raises as `start_engine` does.
    """

    def __init__(self, model: ModelConfig):
        model = local_model(model)
        options = model.engine
        if options.max_num_batched_tokens is None:
            options = options.model_copy(update={"max_num_batched_tokens": OFFLINE_BATCHED_TOKENS})
        self._model = model
        load_model_spec(options.model)  # says what is wrong with a folder before its tokenizer is missed
        self._tokenizer = None if options.skip_tokenizer_init else load_tokenizer(options.model)
        self._core = start_core(partial(start_engine, options))

    @asynccontextmanager
    async def answers(self) -> AsyncIterator[tuple[Ask, int]]:
        """A block with what answers requests, and how many should be in flight. The engine ends with it.

        What answers raises EngineDeadError when the engine has stopped.
        """
        sys.setswitchinterval(SWITCH_S)
        model = OfflineModel(self._model, self._core, self._tokenizer)
        client = AppClient(model.app())

        async def ask(request: BatchRequest) -> tuple[int, bytes]:
            answer = await client.ask(request)
            model.check()
            return answer

        try:
            yield ask, model.limit
        finally:
            await model.close()
