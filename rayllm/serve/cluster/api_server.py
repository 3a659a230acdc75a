"""The API server: the HTTP app over the models' fronts, on a port of its own or behind Ray Serve's proxies."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import time
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from fastapi import FastAPI

from rayllm import timeouts
from rayllm.config.options import ModelServerConfig, ServerConfig
from rayllm.errors import EngineDeadError
from rayllm.executor.ray_compat import log_folder
from rayllm.serve.cluster.directory import DirectoryLink, ServerMember, View, follow
from rayllm.serve.cluster.front import FrontModel, ModelFront
from rayllm.serve.cluster.place import Place, address, own_place
from rayllm.serve.http.app import create_app
from rayllm.serve.http.limits import Admission, ApiKey
from rayllm.serve.http.telemetry import make_tracer, open_log
from rayllm.text.tokenizer import load_tokenizer

KEEP_ALIVE_S = 90  # of idle connections; longer than the ingress keeps them


class FrontOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What an API server is configured with."""

    models: list[FrontModel]
    # Without its api_key, which is in `keys`, as a hash.
    server: ServerConfig = ServerConfig()
    keys: list[ApiKey] = []
    # Where traces go; None for nowhere.
    trace_endpoint: str | None = None
    # Ray's id of the node of the ingress that passes connections on; API servers there listen on loopback.
    ingress_node: str = ""


class ServedModels:
    """The `ServerState` of an API server: a front for each model, which the directory keeps up to date.

    on_stop: called, maybe several times, with the seconds in which everything is to end.
    """

    def __init__(
        self,
        options: FrontOptions,
        place: Place,
        registry: DirectoryLink | None = None,
        on_stop: Callable[[float], object] = lambda _seconds: None,
    ):
        self._options, self._place, self._on_stop = options, place, on_stop
        self._registry = registry or DirectoryLink(place.app_name)
        self._server_id = uuid.uuid4().hex
        self._address, self._draining = "", False
        self._following: asyncio.Task[None] | None = None
        self._door = Admission(ModelServerConfig(max_queued_requests=0), 0)
        self._tracer = make_tracer(options.trace_endpoint)
        self.models: dict[str, ModelFront] = {}

    async def start(self) -> None:
        """Return when every model has an engine."""
        open_log(self._options.server.log_format, request_log(self._place))
        for model in self._options.models:
            tokenizer = None if model.skip_tokenizer_init else await asyncio.to_thread(load_tokenizer, model.folder)
            self.models[model.name] = ModelFront(model, tokenizer, self._server_id, self._place.node_id)
        self._following = asyncio.create_task(follow(self._registry, self._member, self._on_view))
        while not all(model.num_replicas for model in self.models.values()):
            await asyncio.sleep(timeouts.REGISTER_S / 10)

    def make_app(self, **options: Any) -> FastAPI:
        """The HTTP app. options: as of `create_app`."""
        return create_app(self, self._options.server, self._options.keys, tracer=self._tracer, **options)

    async def announce(self, *, address: str, draining: bool = False) -> None:
        """Have the directory say that this server listens there, and whether it takes new requests."""
        self._address, self._draining = address, draining
        await self._registry.beat(self._member())

    async def close(self) -> None:
        """Leave the directory and disconnect from the engines; what still runs is aborted."""
        if self._following is not None:
            self._following.cancel()
        await self._registry.leave(self._server_id)
        for model in self.models.values():
            await model.close()
        if self._tracer is not None:
            self._tracer.close()

    @property
    def door(self) -> Admission:
        """Where requests count until their model is known: their own one's, or as many as all models may have."""
        models = list(self.models.values())
        if len(models) == 1:
            return models[0].admission
        self._door.max_running = sum(model.admission.max_live for model in models)
        return self._door

    @property
    def is_busy(self) -> bool:
        """Whether a request runs."""
        return any(model.admission.load.completions for model in self.models.values())

    def _member(self) -> ServerMember:
        return ServerMember(self._server_id, self._place.node_id, self._address, self._draining)

    async def _on_view(self, view: View) -> None:
        for name, model in self.models.items():
            await model.update([engine for engine in view.engines if engine.model == name], view.front_keys)
        if view.stop_in is not None:
            self._on_stop(view.stop_in)


class ApiServer:
    """An API server that listens itself, as a replica of a Serve deployment."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, options: FrontOptions, *_engines: Any, place: Place | None = None, registry: DirectoryLink | None = None
    ) -> None:
        """_engines: their deployments, which Serve starts because they are named here."""
        self._place = place or own_place()
        self._drain_timeout = max(options.server.drain_timeout, options.server.replica_drain_timeout)
        self._stopping: asyncio.Task[None] | None = None
        self._stop_at = math.inf  # time.monotonic()
        self._models = ServedModels(options, self._place, registry, self._stop_within)
        await self._models.start()
        host = "127.0.0.1" if self._place.node_id == options.ingress_node else self._place.host
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.address = address(host, listener.getsockname()[1])
        settings = uvicorn.Config(
            self._models.make_app(), lifespan="off", access_log=False, log_config=None, timeout_keep_alive=KEEP_ALIVE_S
        )
        self._server = uvicorn.Server(settings)
        self._serving = asyncio.create_task(self._server.serve([listener]))
        while not self._server.started:
            await asyncio.sleep(0.01)
        await self._models.announce(address=self.address)

    async def check_health(self) -> None:
        """For Serve, which restarts a replica after three failures in a row."""
        if self._serving.done():
            raise EngineDeadError("the HTTP server has stopped")

    async def __del__(self) -> None:
        """Serve calls this before it ends the replica."""
        if not hasattr(self, "_serving"):  # the constructor failed
            return
        if self._stopping is None:
            await self._models.announce(address=self.address, draining=True)
            await asyncio.sleep(2 * timeouts.INGRESS_WATCH_S + timeouts.REGISTER_S)  # for the ingress to see it
        await self._stop_within(self._drain_timeout)

    def _stop_within(self, seconds: float) -> asyncio.Task[None]:
        """Answer the requests that run, and end; what is left then is aborted. Calling it again can only shorten it."""
        self._stop_at = min(self._stop_at, time.monotonic() + seconds)
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop())
        return self._stopping

    async def _stop(self) -> None:
        # Until it is idle it listens: if the engines drain too, it says so to new requests.
        while self._models.is_busy and time.monotonic() < self._stop_at:
            await asyncio.sleep(0.05)
        self._server.config.timeout_graceful_shutdown = 1  # for ends of answers that are still to be sent
        self._server.should_exit = True
        await self._serving
        await self._models.close()


def request_log(place: Place) -> Path | None:
    """The file of an API server's request log, beside Serve's own logs; None for standard error."""
    folder = log_folder()
    return None if folder is None else folder / "serve" / f"requests_{place.replica_id}.log"


def app_builder(options: FrontOptions) -> Callable[[], FastAPI]:
    """For `serve.ingress`: the app of an API server behind Serve's proxies, built on each replica."""

    def build() -> FastAPI:
        models = ServedModels(options, own_place())

        @contextlib.asynccontextmanager
        async def life(_app: FastAPI) -> AsyncIterator[None]:
            await models.start()
            yield
            await models.close()

        # Serve puts the request's id into the response itself.
        return models.make_app(echo_request_id=False, lifespan=life)

    return build
