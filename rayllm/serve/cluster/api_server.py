"""The API server: the HTTP app over the models' fronts, on a port of its own or behind Ray Serve's proxies."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import os
import socket
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from fastapi import FastAPI

from rayllm import timeouts
from rayllm.api.types import Load
from rayllm.api.wire import VERSION
from rayllm.config.options import ModelServerConfig, ServerConfig
from rayllm.engine.folder import SharedFolder
from rayllm.errors import ConfigError, EngineDeadError
from rayllm.executor.checkpoints import fetch_checkpoint
from rayllm.executor.ray_compat import log_folder
from rayllm.serve.cluster.directory import (
    DirectoryLink,
    Membership,
    Place,
    Report,
    ServerMember,
    View,
    adapters_known,
    address,
    own_place,
)
from rayllm.serve.cluster.front import FrontModel, ModelFront
from rayllm.serve.cluster.spot import watch_host
from rayllm.serve.cluster.status import cluster_status, describe
from rayllm.serve.cluster.stopped import end_if_stopped
from rayllm.serve.http.app import create_app
from rayllm.serve.http.auth import ApiKey
from rayllm.serve.http.batches.files import MIB, FileLimits
from rayllm.serve.http.batches.store import BatchStore
from rayllm.serve.http.batches.worker import BatchWorker
from rayllm.serve.http.jobs import Jobs
from rayllm.serve.http.limits import Admission
from rayllm.serve.http.request_log import make_tracer, open_log
from rayllm.serve.http.responses.store import ResponseStore, StoreLimits
from rayllm.text.tokenizer import Tokenizer, load_tokenizer

KEEP_ALIVE_S = 90  # of idle connections; longer than the ingress keeps them
# How long responses are stored if no option says it: in a folder of this deployment, and in one that was named.
OWN_TTL_S, NAMED_TTL_S = 3600.0, 30 * 86400.0
GIB = 2**30


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

    end_http: called when it is to stop and has no requests any more, or no time; None if Serve ends that itself.
    """

    def __init__(
        self,
        options: FrontOptions,
        place: Place,
        registry: DirectoryLink | None = None,
        end_http: Callable[[], Awaitable[None]] | None = None,
    ):
        self._options, self._place, self._end_http = options, place, end_http
        self._directory = registry or DirectoryLink(place.app_name)
        self._server_id = uuid.uuid4().hex
        self._batches: asyncio.Task[None] | None = None
        self._door = Admission(ModelServerConfig(max_queued_requests=0), 0)
        self._tracer = make_tracer(options.trace_endpoint)
        self.models: dict[str, ModelFront] = {}
        self.jobs = Jobs()
        # Once it is known where.
        self._responses: ResponseStore | None = None
        self._batch_store: BatchStore | None = None
        self._folder: SharedFolder | None = None  # of this deployment and host, if no other one is named
        self.address, self.is_draining = "", False  # as the directory is told
        self._is_outdated = False
        self._adapters_known = 0  # as `ServerMember` has it

    async def start(self) -> None:
        """Return when every model has an engine, and those on their way have answered. Raises ConfigError,
        StartupError.
        """
        if (named := self._options.server.state_dir) is not None:
            self._open_stores(_named_folder(named))
        folder, name = log_folder(), f"requests_{self._place.replica_id}.log"  # beside Serve's own logs
        open_log(self._options.server.log_format, None if folder is None else folder / "serve" / name)
        for model in self._options.models:
            tokenizer = None if model.skip_tokenizer_init else await asyncio.to_thread(_load_tokenizer, model.folder)
            place = self._place
            self.models[model.name] = ModelFront(
                model, tokenizer, self._server_id, place.node_id, place.replica_index, directory=self._directory
            )
        watch_host(self._options.server.spot_notices, self._place.node_id)
        self.membership = Membership(self._directory, self._member, self._report, self._on_view, self._stop)
        while not all(model.num_replicas for model in self.models.values()):
            await asyncio.sleep(timeouts.REGISTER_S / 10)
        # The first one may be about to leave; then there would be none for a moment.
        deadline = time.monotonic() + timeouts.CONNECT_S
        while any(model.is_connecting for model in self.models.values()) and time.monotonic() < deadline:
            await asyncio.sleep(timeouts.REGISTER_S / 10)

    def make_app(self, **options: Any) -> FastAPI:
        """The HTTP app. options: as of `create_app`."""
        server, keys = self._options.server, self._options.keys
        return create_app(self, server, keys, tracer=self._tracer, batches=lambda: self.batch_store, **options)

    def work_on_batches(self, app: FastAPI) -> None:
        """Take up batches from now on, and ask the app for their answers."""
        worker = BatchWorker(self, app, self.batch_store)
        self._batches = asyncio.create_task(worker.run())

    @property
    def door(self) -> Admission:
        """Where requests count until their model is known: their own one's, or as many as all models may have."""
        models = list(self.models.values())
        if len(models) == 1:
            return models[0].admission
        self._door.max_running = sum(model.admission.max_live for model in models)
        return self._door

    @property
    def response_store(self) -> ResponseStore:
        """Where responses are stored; it is known before any model has an engine."""
        assert self._responses is not None
        return self._responses

    @property
    def batch_store(self) -> BatchStore:
        """Where files and batches are stored; known as `response_store` is."""
        assert self._batch_store is not None
        return self._batch_store

    def _open_stores(self, folder: Path) -> None:
        responses = folder / "responses"
        responses.mkdir(mode=0o700, exist_ok=True)
        self._responses = ResponseStore(responses, response_limits(self._options.server))
        self._batch_store = BatchStore(folder, file_limits(self._options.server))

    async def describe_cluster(self) -> list[str]:
        """What `rayllm status` prints."""
        return describe(await asyncio.to_thread(cluster_status))

    async def cluster_json(self) -> bytes:
        """What `rayllm status --json` prints."""
        return msgspec.json.encode(await asyncio.to_thread(cluster_status))

    async def _stop(self) -> None:
        if self._batches is not None:  # others go on with them
            self._batches.cancel()
            await asyncio.wait([self._batches])
        # Until it is idle it listens: if the engines drain too, it says so to new requests.
        while any(model.admission.load.completions for model in self.models.values()):
            if time.monotonic() > self.membership.stop_at:
                break
            await asyncio.sleep(0.05)
        await self.jobs.close()  # what they run, API servers that go on take over
        if self._end_http is not None:
            await self._end_http()
        for model in self.models.values():
            await model.close()
        if self._folder is not None:
            self._folder.leave()
        if self._tracer is not None:
            self._tracer.close()

    def _member(self) -> ServerMember:
        draining = self.is_draining or self._is_outdated
        return ServerMember(
            self._server_id,
            self._place.node_id,
            list(self.models),
            self.address,
            draining,
            adapters_known=self._adapters_known,
        )

    def _report(self) -> Report:
        load = sum((model.admission.load for model in self.models.values()), Load())
        return Report(member=self._member(), load=load, stop_in=self.membership.stop_in)

    async def _on_view(self, view: View) -> None:
        if self._responses is None:  # all API servers of this deployment find the same name, and nobody else
            secret = f"state {view.front_keys.secret}".encode()
            self._folder = SharedFolder(hashlib.sha256(secret).hexdigest()[:32])
            self._open_stores(self._folder.path)
        # An update of rayllm has replaced the engines of a model, and other API servers talk to those.
        lost = {name for name, model in self.models.items() if not model.num_replicas}
        others = {engine.model for engine in view.engines if engine.version != VERSION}
        self._is_outdated = bool(self.address) and bool(lost & others)
        self._adapters_known = adapters_known(view)
        for name, model in self.models.items():
            model.is_last = view.stop_in is not None
            model.lora.update(view)
            await model.update([engine for engine in view.engines if engine.model == name], view.front_keys)


class ApiServer:
    """An API server that listens itself, as a replica of a Serve deployment."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, options: FrontOptions, *_engines: Any, place: Place | None = None, registry: DirectoryLink | None = None
    ) -> None:
        """_engines: their deployments, which Serve starts because they are named here."""
        if place is None:  # in a process of its own
            end_if_stopped(timeouts.STOPPED_S)
        place = place or own_place()
        self._drain_timeout, self._place = options.server.api_server_drain_timeout, place
        self._models = ServedModels(options, place, registry, self._end_http)
        await self._models.start()
        host = "127.0.0.1" if place.node_id == options.ingress_node else place.host
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        app = self._models.make_app()
        settings = uvicorn.Config(
            app, lifespan="off", access_log=False, log_config=None, timeout_keep_alive=KEEP_ALIVE_S
        )
        self._server = uvicorn.Server(settings)
        self._serving = asyncio.create_task(self._server.serve([listener]))
        self._models.address = address(host, listener.getsockname()[1])
        self._models.work_on_batches(app)
        # Full passes of the garbage collector visit libraries too, for 100 to 200 ms, if these are not left out.
        gc.collect()
        gc.freeze()
        # Serve asks the instance for this. As a method of the class, Python would call it at the end of an instance
        # too, and nobody would await it.
        self.__del__ = self._leave
        await self._models.membership.announce()

    async def check_health(self) -> None:
        """For Serve, which restarts a replica after three failures in a row."""
        if self._serving.done():
            raise EngineDeadError("the HTTP server has stopped")

    async def _leave(self) -> None:
        """Serve calls this before it ends the replica, if the constructor has not failed."""
        membership = self._models.membership
        seconds = await membership.time_to_stop(self._drain_timeout, self._place)
        if not membership.is_stopping:
            self._models.is_draining = True
            await membership.announce()
            await asyncio.sleep(2 * timeouts.INGRESS_WATCH_S + timeouts.REGISTER_S)  # for the ingress to see it
        await membership.stop_within(seconds)

    async def _end_http(self) -> None:
        if hasattr(self, "_serving"):  # else the constructor still waits for engines
            self._server.config.timeout_graceful_shutdown = 1  # for ends of answers that are still to be sent
            self._server.should_exit = True
            await self._serving


def _named_folder(name: str) -> Path:
    """The folder of the option, which is made if need be. Raises ConfigError."""
    folder = Path(name)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"state_dir {name}: {error.strerror}") from None
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(f"state_dir {name}: this user may not write to it")
    return folder


def response_limits(server: ServerConfig) -> StoreLimits:
    """The limits of stored responses, as the options have them."""
    ttl = server.response_ttl or (OWN_TTL_S if server.state_dir is None else NAMED_TTL_S)
    return StoreLimits(server.max_responses, int(server.response_space * GIB), ttl)


def file_limits(server: ServerConfig) -> FileLimits:
    """The limits of files, as the options have them."""
    return FileLimits(server.max_file_mib * MIB, int(server.file_space * GIB), server.files_ttl)


def _load_tokenizer(folder: str) -> Tokenizer:
    fetch_checkpoint(folder, weights=False)
    return load_tokenizer(folder)


def app_builder(options: FrontOptions) -> Callable[[], FastAPI]:
    """For `serve.ingress`: the app of an API server behind Serve's proxies, built on each replica."""

    def build() -> FastAPI:
        end_if_stopped(timeouts.STOPPED_S)
        models = ServedModels(options, own_place())

        @contextlib.asynccontextmanager
        async def life(app: FastAPI) -> AsyncIterator[None]:
            await models.start()
            models.work_on_batches(app)
            yield
            await models.membership.stop_within(0)

        # Serve puts the request's id into the response itself.
        return models.make_app(echo_request_id=False, lifespan=life)

    return build
