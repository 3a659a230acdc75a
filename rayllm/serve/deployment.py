"""The two Ray Serve deployments: `EngineReplica`, the engine's driver, and `ApiServer`, the HTTP front.

    proxy -> ApiServer (CPU only, any number) == Unix socket, msgpack ==> EngineReplica (one; its workers hold the GPUs)

`build_app` is the application builder for `serve run` and Serve's config files; `launcher.py` uses the same parts.
Nothing here imports torch: only the replica's constructor does, in its own process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import yaml
from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig

from rayllm.config import EngineConfig, ServerConfig, make_config
from rayllm.errors import ConfigError, EngineDeadError
from rayllm.serve.admission import Admission
from rayllm.serve.auth import ApiKey, load_api_keys
from rayllm.serve.engine_replica import Endpoint, EngineReplica, node_id
from rayllm.serve.metrics import FrontMetrics
from rayllm.serve.request_log import open_log
from rayllm.serve.tracing import make_tracer, trace_endpoint

if TYPE_CHECKING:
    from fastapi import FastAPI

    from rayllm.engine.async_engine import AsyncEngine
    from rayllm.serve.fanout import Engine

logger = logging.getLogger("ray.serve")

WATCH_S = 1.0  # how often an ApiServer looks whether the engine is still the same one
CALL_TIMEOUT_S = 5.0
# A fraction of a core each, so that a whole deployment fits on two. It is a reservation, not a limit.
NUM_CPUS = 0.1


class FrontOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What an ApiServer is configured with. server: without its api_key, which is in `keys`, as a hash.

    max_running: completions that the engine runs at once. trace_endpoint: where traces go; None for nowhere.
    """

    server: ServerConfig = ServerConfig()
    keys: list[ApiKey] = []
    max_running: int = 256
    trace_endpoint: str | None = None


class ApiServer:
    """The HTTP front: validation, chat template, tokens, text, SSE. Follows the engine when it is restarted."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        engine: DeploymentHandle,
        model: str,
        model_name: str,
        skip_tokenizer_init: bool = False,
        options: FrontOptions = FrontOptions(),
    ) -> None:
        self._handle = engine
        self._model = model
        self._options = options
        self.model_name = model_name
        self.metrics = FrontMetrics()
        self.admission = Admission(options.server, options.max_running)
        self._server_id = uuid.uuid4().hex
        self._engine: AsyncEngine | None = None
        self._endpoint: Endpoint | None = None
        self._why_not = "the engine is starting"
        open_log(options.server.log_format, _request_log(self._server_id))
        self._tracer = make_tracer(options.trace_endpoint)
        self._tokenizer = None
        if not skip_tokenizer_init:
            from rayllm.engine.tokenizer import load_tokenizer

            self._tokenizer = await asyncio.to_thread(load_tokenizer, model)
        await self._connect(await engine.endpoint.remote())  # which waits until the engine is up
        self._watcher = asyncio.create_task(self._watch())

    def __serve_build_asgi_app__(self) -> FastAPI:
        from rayllm.serve.app import create_app

        options = self._options
        # Serve's proxy puts the request's id into the response itself.
        return create_app(self, options.server, options.keys, tracer=self._tracer, echo_request_id=False)

    def __del__(self) -> None:
        """Serve calls this before it ends the replica."""
        tracer = getattr(self, "_tracer", None)
        if tracer is not None:
            tracer.close()

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
        if endpoint.node_id == node_id():
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
                endpoint = await asyncio.wait_for(self._handle.endpoint.remote(self._server_id), CALL_TIMEOUT_S)
                await self._follow(endpoint)
                call = self._handle.exchange_load.remote(self._server_id, self.admission.load)
                self.admission.others = await asyncio.wait_for(call, CALL_TIMEOUT_S)
                await self.all_metrics()
            except Exception as error:
                logger.warning("the engine cannot be reached: %s", error or type(error).__name__)
                await self._disconnect("the engine is being restarted")


def make_application(
    config: EngineConfig,
    server: ServerConfig,
    replica: type[EngineReplica] = EngineReplica,
    *,
    keys: Sequence[ApiKey] = (),
) -> serve.Application:
    """The Serve application of one model. config.device must be "cpu" or "cuda" by now (see `resolve_device`).

    replica: the engine's class; tests put a stand-in here. keys: of the API (see `load_api_keys`). Raises ConfigError.
    """
    options = FrontOptions(
        server=server.model_copy(update={"api_key": None}),
        keys=list(keys),
        max_running=config.max_num_seqs,
        trace_endpoint=trace_endpoint(server.otlp_endpoint, os.environ),
    )
    logs = LoggingConfig(enable_access_log=False, encoding=server.log_format.upper())
    engine = serve.deployment(
        name="EngineReplica",
        num_replicas=1,
        max_ongoing_requests=100_000,  # the scheduler queues, not Serve
        max_constructor_retry_count=1,  # a config or checkpoint that fails once fails again
        health_check_period_s=2,
        health_check_timeout_s=30,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=server.drain_timeout + 10,
        logging_config=logs,
        **engine_placement(config),
    )(replica)
    api = serve.deployment(
        name="ApiServer",
        num_replicas=server.num_api_servers,
        max_ongoing_requests=100_000,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=server.drain_timeout + 5,
        ray_actor_options={"num_cpus": NUM_CPUS},
        logging_config=logs,
    )(serve.ingress()(ApiServer))
    bound = engine.bind(config.model_dump(), server.drain_timeout)
    return api.bind(bound, config.model, served_name(config, server), config.skip_tokenizer_init, options)


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
    command line has them. api_key is refused: Serve keeps and shows these arguments. Raises ConfigError or ModelError.
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
    if server.api_key is not None:
        raise ConfigError("api_key would be shown by Ray Serve; use api_key_file or the environment's RAYLLM_API_KEY")
    keys = load_api_keys(server, dict(os.environ))
    check_parallel(load_model_spec(config.model), config.tensor_parallel_size)
    config = config.model_copy(update={"model": str(Path(config.model).resolve())})
    if config.device == "auto":
        # `serve run` builds the application before it connects: this machine has to stand for the cluster then.
        has_gpus = ray.cluster_resources().get("GPU", 0) if ray.is_initialized() else Path("/dev/nvidiactl").exists()
        config = config.model_copy(update={"device": "cuda" if has_gpus else "cpu"})
    return make_application(config, server, keys=keys)


def _request_log(server_id: str) -> Path | None:
    """The file of an API server's request log, beside Serve's own logs; None outside of Ray."""
    import ray

    node = ray._private.worker._global_node
    return None if node is None else Path(node.get_logs_dir_path()) / "serve" / f"requests_{server_id[:8]}.log"
