"""The Ray Serve application: an `EngineReplica` deployment a model, and `ApiServer`, the HTTP front of all of them.

    proxy -> ApiServer (CPU only, any number) == Unix sockets, msgpack ==> EngineReplica (any number a model)

`build_app` is the application builder for `serve run` and Serve's config files; `launcher.py` uses the same parts.
Nothing here imports torch: only a replica's constructor does, in its own process.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import yaml
from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig

import rayllm
from rayllm.config.options import EngineConfig, ModelConfig, ModelServerConfig, ServerConfig, make_models, split_options
from rayllm.errors import ConfigError
from rayllm.serve.cluster.autoscaling import autoscaling_options
from rayllm.serve.cluster.front import FrontModel, ModelFront
from rayllm.serve.cluster.replica import EngineReplica
from rayllm.serve.http.auth import ApiKey, load_api_keys
from rayllm.serve.http.limits import Admission
from rayllm.serve.http.request_log import open_log
from rayllm.serve.http.tracing import make_tracer, trace_endpoint

if TYPE_CHECKING:
    from fastapi import FastAPI

    from rayllm.text.tokenizer import Tokenizer

# A fraction of a core each, so that a whole deployment fits on two. It is a reservation, not a limit.
NUM_CPUS = 0.1
ADDRESSED_ROUTER = "rayllm.serve.cluster.addressed_router.AddressedRouter"
KILL_S = 10  # after the time that running requests have, before Serve ends a replica by force


class FrontOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What an ApiServer is configured with. server: without its api_key, which is in `keys`, as a hash.

    trace_endpoint: where traces go; None for nowhere.
    """

    models: list[FrontModel]
    server: ServerConfig = ServerConfig()
    keys: list[ApiKey] = []
    trace_endpoint: str | None = None


class ApiServer:
    """The HTTP front: validation, chat template, tokens, text, SSE, and the choice of a replica."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, engines: dict[str, DeploymentHandle], options: FrontOptions
    ) -> None:
        """engines: model name -> its deployment."""
        self._options = options
        server_id = uuid.uuid4().hex
        open_log(options.server.log_format, _request_log(server_id))
        self._tracer = make_tracer(options.trace_endpoint)
        self.models: dict[str, ModelFront] = {}
        for model in options.models:
            tokenizer = await asyncio.to_thread(_tokenizer, model)
            self.models[model.name] = ModelFront(model, engines[model.name], tokenizer, server_id)
        self._door = Admission(ModelServerConfig(max_queued_requests=0), 0)
        await asyncio.gather(*(model.start() for model in self.models.values()))

    def __serve_build_asgi_app__(self) -> FastAPI:
        from rayllm.serve.http.app import create_app

        options = self._options
        # Serve puts the request's id into the response itself.
        return create_app(self, options.server, options.keys, tracer=self._tracer, echo_request_id=False)

    async def __del__(self) -> None:
        """Serve calls this before it ends the replica, when its requests are done."""
        tracer = getattr(self, "_tracer", None)
        if tracer is not None:
            tracer.close()
        for model in getattr(self, "models", {}).values():
            await model.close()

    @property
    def door(self) -> Admission:
        """Where requests count until their model is known: their own one's, or as many as all models may have."""
        models = list(self.models.values())
        if len(models) == 1:
            return models[0].admission
        self._door.max_running = sum(model.admission.max_live for model in models)
        return self._door


def make_application(
    models: Sequence[ModelConfig],
    server: ServerConfig,
    replica: type[EngineReplica] = EngineReplica,
    *,
    keys: Sequence[ApiKey] = (),
    free_gpus: float | None = None,
) -> serve.Application:
    """The Serve application. The models' device must be "cpu" or "cuda" by now (see `resolve_device`).

    replica: the engines' class; tests put a stand-in here. keys: of the API (see `load_api_keys`). free_gpus: that an
    update may use before it has freed any; None if that is not known. Raises ConfigError.
    """
    options = FrontOptions(
        models=[_front_model(model) for model in models],
        server=_without_key(server),
        keys=list(keys),
        trace_endpoint=trace_endpoint(server.otlp_endpoint, os.environ),
    )
    logs = LoggingConfig(enable_access_log=False, encoding=server.log_format.upper())
    drain = max(server.drain_timeout, server.replica_drain_timeout)
    engines = {}
    for name, model in zip(deployment_names(models), models, strict=True):
        engine = serve.deployment(
            name=name,
            max_ongoing_requests=100_000,  # the scheduler queues, not Serve
            max_constructor_retry_count=1,  # a config or checkpoint that fails once fails again
            health_check_period_s=2,
            health_check_timeout_s=30,
            graceful_shutdown_wait_loop_s=0.1,
            graceful_shutdown_timeout_s=drain + KILL_S,
            max_surge_percent=_surge_percent(model, free_gpus),
            request_router_config={"request_router_class": ADDRESSED_ROUTER},
            logging_config=logs,
            **autoscaling_options(model.engine, model.server),
            **engine_placement(model.engine),
        )(replica)
        arguments = (model.engine.model_dump(), server.replica_drain_timeout)
        # Replicas that were started without autoscaling never report to it.
        version = repr((arguments, model.server.max_replicas is not None))
        engines[model.name] = _versioned(engine, version).bind(*arguments)
    api = serve.deployment(
        name="ApiServer",
        num_replicas=server.num_api_servers or default_api_servers(os.cpu_count() or 1),
        max_ongoing_requests=100_000,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=drain + KILL_S,
        max_surge_percent=100,
        ray_actor_options={"num_cpus": NUM_CPUS},
        logging_config=logs,
    )(serve.ingress()(ApiServer))
    return _versioned(api, repr(options)).bind(engines, options)


def default_api_servers(cores: int) -> int:
    """API servers on a machine of so many cores; a token costs one of them 137 us on a slow core."""
    return min(max(cores // 4, 1), 8)


def deployment_names(models: Sequence[ModelConfig]) -> list[str]:
    """The names of the models' deployments in Serve, which end up in paths, so they have only harmless characters."""
    names = []
    for model in models:
        plain = re.sub(r"[^A-Za-z0-9._-]", "-", model.name)
        digest = hashlib.sha256(model.name.encode()).hexdigest()[:8]
        names.append(f"engine-{plain}" if plain == model.name else f"engine-{plain[:80]}-{digest}")
    return names


def _versioned(deployment: Any, options: str) -> Any:
    """The deployment with a version that says what its replicas are made of: Serve replaces those of another one.

    Left to itself, Serve replaces every replica of an application whenever it is deployed again.
    """
    version = hashlib.sha256(f"{rayllm.__version__} {options}".encode()).hexdigest()[:16]
    return deployment.options(version=version, _internal=True)


def _surge_percent(model: ModelConfig, free_gpus: float | None) -> int:
    """How many new replicas, of 100 old ones, an update starts before it stops old ones.

    All, if there is room. Without GPUs for even one, the old ones have to go first, one after the other.
    """
    if model.engine.device != "cuda" or free_gpus is None:
        return 100
    fitting = int(free_gpus) // model.engine.tensor_parallel_size
    return min(100 * fitting // model.server.num_replicas, 100)


def _front_model(model: ModelConfig) -> FrontModel:
    return FrontModel(
        name=model.name,
        folder=model.engine.model,
        server=_without_key(model.server),
        skip_tokenizer_init=model.engine.skip_tokenizer_init,
        max_num_seqs=model.engine.max_num_seqs,
    )


def _without_key(server: ServerConfig) -> ServerConfig:
    return server.model_copy(update={"api_key": None})


def _tokenizer(model: FrontModel) -> Tokenizer | None:
    if model.skip_tokenizer_init:
        return None
    from rayllm.text.tokenizer import load_tokenizer

    return load_tokenizer(model.folder)


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


def resolve_devices(models: Sequence[ModelConfig], cluster_gpus: float) -> list[ModelConfig]:
    """Settle every model's device, see `resolve_device`. Raises ConfigError if all together need more GPUs than there
    are."""
    settled = [model._replace(engine=resolve_device(model.engine, cluster_gpus)) for model in models]
    needed = {
        model.name: model.engine.tensor_parallel_size * model.server.num_replicas
        for model in settled
        if model.engine.device == "cuda"
    }
    if sum(needed.values()) > cluster_gpus:
        parts = ", ".join(f"{name} {count}" for name, count in needed.items())
        raise ConfigError(f"the replicas need {sum(needed.values())} GPUs ({parts}); the cluster has {cluster_gpus:g}")
    return settled


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
    """Application builder for Ray Serve: `serve run rayllm.serve:build_app model=/path max_model_len=4096`.

    args: options of EngineConfig and ServerConfig, and `models` (host and port are Serve's own there); values may be
    strings, as the command line has them. api_key is refused: Serve keeps and shows these arguments. Raises ConfigError
    or ModelError.
    """
    import ray

    from rayllm.config.model_spec import check_parallel, load_model_spec

    models, server = make_models(split_options({key: _from_text(key, value) for key, value in args.items()}))
    if server.api_key is not None:
        raise ConfigError("api_key would be shown by Ray Serve; use api_key_file or the environment's RAYLLM_API_KEY")
    if server.ingress == "haproxy":
        raise ConfigError(
            "ingress haproxy is for rayllm launch; here RAY_SERVE_ENABLE_HA_PROXY=1 does that, where Ray is started"
        )
    keys = load_api_keys(server, dict(os.environ))
    # `serve run` builds the application before it connects: this machine has to stand for the cluster then.
    knows = ray.is_initialized()
    has_gpus = bool(ray.cluster_resources().get("GPU", 0)) if knows else Path("/dev/nvidiactl").exists()
    settled = []
    for model in models:
        config = model.engine
        check_parallel(load_model_spec(config.model), config.tensor_parallel_size)
        device = config.device if config.device != "auto" else "cuda" if has_gpus else "cpu"
        changes = {"model": str(Path(config.model).resolve()), "device": device}
        settled.append(model._replace(engine=config.model_copy(update=changes)))
    free = ray.available_resources().get("GPU", 0) if knows else None
    return make_application(settled, server, keys=keys, free_gpus=free)


def _from_text(key: str, value: Any) -> Any:
    """An option's value, which may be the text of one that is no text."""
    field = {**EngineConfig.model_fields, **ServerConfig.model_fields}.get(key)
    is_text = field is not None and field.annotation in (str, str | None)
    return yaml.safe_load(value) if isinstance(value, str) and not is_text else value


def _request_log(server_id: str) -> Path | None:
    """The file of an API server's request log, beside Serve's own logs; None outside of Ray."""
    import ray

    node = ray._private.worker._global_node
    return None if node is None else Path(node.get_logs_dir_path()) / "serve" / f"requests_{server_id[:8]}.log"
