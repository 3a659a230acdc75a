"""The two Ray Serve deployments: `EngineReplica`, the engine's driver, and `ApiServer`, the HTTP front.

    proxy -> ApiServer (CPU only, any number) == Unix socket, msgpack ==> EngineReplica (one; its workers hold the GPUs)

`build_app` is the application builder for `serve run` and Serve's config files; `launcher.py` uses the same parts.
Nothing here imports torch: only the replica's constructor does, in its own process.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import yaml
from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig

from rayllm.config import EngineConfig, ServerConfig, make_config
from rayllm.errors import ConfigError, EngineDeadError
from rayllm.serve.metrics import FrontMetrics
from rayllm.types import EngineInfo, EngineStats, GenerationRequest, TokenDelta

if TYPE_CHECKING:
    from fastapi import FastAPI

    from rayllm.engine.async_engine import AsyncEngine
    from rayllm.serve.fanout import Engine

logger = logging.getLogger("ray.serve")

STEP_DEADLINE_S = 120.0  # work queued and no step finished for so long: unhealthy
DRAIN_S = 5.0  # how long a stopping replica lets running requests go on
WATCH_S = 1.0  # how often an ApiServer looks whether the engine is still the same one
CALL_TIMEOUT_S = 5.0
# A fraction of a core each, so that a whole deployment fits on two. It is a reservation, not a limit.
NUM_CPUS = 0.1

_LOGGING = LoggingConfig(enable_access_log=False)


class Endpoint(msgspec.Struct, frozen=True):
    """Where an engine listens. address: of its Unix socket, different for each start. node_id: the socket's node.

    draining: it is about to stop, and fronts must not send it more.
    """

    address: str
    node_id: str
    draining: bool = False


class EngineReplica:
    """The engine: scheduler and loop in this process, workers here (one rank) or in actors of its placement group.

    The constructor blocks until the engine is ready and raises ConfigError, ModelError or StartupError.
    """

    def __init__(self, options: dict[str, Any]):
        from rayllm.engine.core import build_engine_core
        from rayllm.engine.driver import EngineDriver

        self._driver = EngineDriver(build_engine_core(make_config(EngineConfig, options)))
        self._driver.start()
        self._endpoint = Endpoint(self._driver.serve_zmq(), _node_id())
        self._figures: dict[str, FrontMetrics] = {}

    async def endpoint(self) -> Endpoint:
        return self._endpoint

    async def info(self) -> EngineInfo:
        return self._driver.info

    async def stats(self) -> EngineStats:
        return self._driver.stats()

    async def unhealthy_reason(self) -> str | None:
        """None while steps finish or there is nothing to do."""
        health = self._driver.healthy(STEP_DEADLINE_S)
        return None if health.ok else health.reason

    async def check_health(self) -> None:
        """For Serve, which restarts a replica after three failures in a row."""
        if (reason := await self.unhealthy_reason()) is not None:
            raise EngineDeadError(reason)

    async def exchange_metrics(self, server_id: str, figures: FrontMetrics) -> FrontMetrics:
        """Take one API server's figures, return the sum of all servers', those that are gone included."""
        self._figures[server_id] = figures
        total = FrontMetrics()
        for each in self._figures.values():
            total.add(each)
        return total

    async def relay(self, request: GenerationRequest) -> AsyncGenerator[list[TokenDelta], None]:
        """Run a request for an API server on another node."""
        from rayllm.serve.relay import RelayFront

        async for deltas in RelayFront(self._driver).run(request):
            yield deltas

    async def stop(self) -> None:
        """Let running requests go on for DRAIN_S seconds at most, then end the engine and its workers."""
        self._endpoint = msgspec.structs.replace(self._endpoint, draining=True)
        clock = asyncio.get_running_loop().time
        deadline = clock() + DRAIN_S
        while _busy(self._driver.stats()) and clock() < deadline:
            await asyncio.sleep(0.05)
        await asyncio.to_thread(self._driver.shutdown)

    async def __del__(self) -> None:
        """Serve calls this before it ends the replica."""
        if hasattr(self, "_driver"):  # the constructor may have failed
            await self.stop()


class ApiServer:
    """The HTTP front: validation, chat template, tokens, text, SSE. Follows the engine when it is restarted."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, engine: DeploymentHandle, model: str, model_name: str, skip_tokenizer_init: bool = False
    ) -> None:
        self._handle = engine
        self._model = model
        self.model_name = model_name
        self.metrics = FrontMetrics()
        self._server_id = uuid.uuid4().hex
        self._engine: AsyncEngine | None = None
        self._endpoint: Endpoint | None = None
        self._why_not = "the engine is starting"
        self._tokenizer = None
        if not skip_tokenizer_init:
            from rayllm.engine.tokenizer import load_tokenizer

            self._tokenizer = await asyncio.to_thread(load_tokenizer, model)
        await self._connect(await engine.endpoint.remote())  # which waits until the engine is up
        self._watcher = asyncio.create_task(self._watch())

    def __serve_build_asgi_app__(self) -> FastAPI:
        from rayllm.serve.app import create_app

        return create_app(self)

    def engine(self) -> Engine:
        if self._engine is None or self._endpoint is None:
            raise EngineDeadError(self._why_not)
        if self._endpoint.draining:
            raise EngineDeadError("the server is shutting down")
        if self._engine.dead is not None:
            raise EngineDeadError(self._engine.dead)
        return self._engine

    async def unhealthy_reason(self) -> str | None:
        try:
            self.engine()
            return await asyncio.wait_for(self._handle.unhealthy_reason.remote(), CALL_TIMEOUT_S)
        except EngineDeadError as error:
            return str(error)
        except Exception as error:
            return f"the engine does not answer: {error or type(error).__name__}"

    async def all_metrics(self) -> FrontMetrics:
        try:
            call = self._handle.exchange_metrics.remote(self._server_id, self.metrics)
            return await asyncio.wait_for(call, CALL_TIMEOUT_S)
        except Exception:
            return self.metrics  # better the figures of one server than none

    async def _connect(self, endpoint: Endpoint) -> None:
        from rayllm.engine.async_engine import AsyncEngine
        from rayllm.engine.client import EngineClient, ZmqClient
        from rayllm.serve.relay import RelayClient

        client: EngineClient
        if endpoint.node_id == _node_id():
            client = ZmqClient(endpoint.address)
        else:
            logger.warning("the engine is on another node; requests are relayed, which costs some latency")
            client = RelayClient(self._handle)
        engine = AsyncEngine(client, self._tokenizer)
        await engine.start()
        self._engine, self._endpoint = engine, endpoint

    async def _follow(self, endpoint: Endpoint) -> None:
        """Connect anew if the engine is another one, or the connection is broken."""
        if self._endpoint is not None and endpoint.address == self._endpoint.address and self._alive():
            self._endpoint = endpoint
        elif not endpoint.draining:
            await self._disconnect("the engine was restarted")
            await self._connect(endpoint)

    def _alive(self) -> bool:
        return self._engine is not None and self._engine.dead is None

    async def _disconnect(self, reason: str) -> None:
        engine, self._engine = self._engine, None
        self._why_not = reason
        if engine is not None:
            await engine.close()

    async def _watch(self) -> None:
        """Notice a restarted or lost engine, also when no request does, and hand over this server's figures."""
        while True:
            await asyncio.sleep(WATCH_S)
            try:
                endpoint = await asyncio.wait_for(self._handle.endpoint.remote(), CALL_TIMEOUT_S)
                await self._follow(endpoint)
                await self.all_metrics()
            except Exception as error:
                logger.warning("the engine cannot be reached: %s", error or type(error).__name__)
                await self._disconnect("the engine is being restarted")


def make_application(
    config: EngineConfig, server: ServerConfig, replica: type[EngineReplica] = EngineReplica
) -> serve.Application:
    """The Serve application of one model. config.device must be "cpu" or "cuda" by now (see `resolve_device`).

    replica: the engine's class; tests put a stand-in here.
    """
    engine = serve.deployment(
        name="EngineReplica",
        num_replicas=1,
        max_ongoing_requests=100_000,  # the scheduler queues, not Serve
        max_constructor_retry_count=1,  # a config or checkpoint that fails once fails again
        health_check_period_s=2,
        health_check_timeout_s=30,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=DRAIN_S + 10,
        logging_config=_LOGGING,
        **engine_placement(config),
    )(replica)
    api = serve.deployment(
        name="ApiServer",
        num_replicas=server.num_api_servers,
        max_ongoing_requests=100_000,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=DRAIN_S,
        ray_actor_options={"num_cpus": NUM_CPUS},
        logging_config=_LOGGING,
    )(serve.ingress()(ApiServer))
    bound = engine.bind(config.model_dump())
    return api.bind(bound, config.model, served_name(config, server), config.skip_tokenizer_init)


def engine_placement(config: EngineConfig) -> dict[str, Any]:
    """Deployment options that reserve the engine's resources.

    One rank runs in the replica itself, which then holds the GPU. More ranks, or executor "ray", are actors: bundle 0
    is the replica's, then one bundle a rank. PACK: on one host if it has the GPUs.
    """
    gpu = {"GPU": 1} if config.device == "cuda" else {}
    tp = config.tensor_parallel_size
    if tp == 1 and config.executor != "ray":
        return {"ray_actor_options": {"num_cpus": NUM_CPUS, "num_gpus": gpu.get("GPU", 0)}}
    return {
        "ray_actor_options": {"num_cpus": NUM_CPUS},
        "placement_group_bundles": [{"CPU": NUM_CPUS}] + [{"CPU": NUM_CPUS, **gpu}] * tp,
        "placement_group_strategy": "PACK",
    }


def served_name(config: EngineConfig, server: ServerConfig) -> str:
    """The model's name in the API."""
    return server.served_model_name or Path(config.model).resolve().name


def resolve_device(config: EngineConfig, cluster_gpus: float) -> EngineConfig:
    """Settle device "auto": cuda if the cluster has GPUs. Raises ConfigError if it has fewer than the ranks need."""
    device = config.device if config.device != "auto" else ("cuda" if cluster_gpus >= 1 else "cpu")
    needed = config.tensor_parallel_size
    if device == "cuda" and cluster_gpus < needed:
        raise ConfigError(
            f"tensor_parallel_size {needed} on device cuda needs {needed} GPU{'s' * (needed > 1)}; "
            f"the cluster has {cluster_gpus:g}"
        )
    return config.model_copy(update={"device": device})


def build_app(args: dict[str, Any]) -> serve.Application:
    """Application builder for Ray Serve: `serve run rayllm.serve.deployment:build_app model=/path max_model_len=4096`.

    args: options of EngineConfig and ServerConfig (host and port are Serve's own there); values may be strings, as the
    command line has them. Raises ConfigError or ModelError.
    """
    import ray

    from rayllm.model_spec import check_parallel, load_model_spec

    engine_options: dict[str, Any] = {}
    server_options: dict[str, Any] = {}
    for key, value in args.items():
        options, kind = (
            (server_options, ServerConfig) if key in ServerConfig.model_fields else (engine_options, EngineConfig)
        )
        field = kind.model_fields.get(key)
        is_text = field is not None and field.annotation in (str, str | None)
        options[key] = yaml.safe_load(value) if isinstance(value, str) and not is_text else value
    config = make_config(EngineConfig, engine_options)
    server = make_config(ServerConfig, server_options)
    check_parallel(load_model_spec(config.model), config.tensor_parallel_size)
    config = config.model_copy(update={"model": str(Path(config.model).resolve())})
    if config.device == "auto":
        # `serve run` builds the application before it connects: this machine has to stand for the cluster then.
        has_gpus = ray.cluster_resources().get("GPU", 0) if ray.is_initialized() else Path("/dev/nvidiactl").exists()
        config = config.model_copy(update={"device": "cuda" if has_gpus else "cpu"})
    return make_application(config, server)


def _busy(stats: EngineStats) -> bool:
    return stats.num_running + stats.num_waiting + stats.num_swapped > 0


def _node_id() -> str:
    import ray

    return ray.get_runtime_context().get_node_id()
