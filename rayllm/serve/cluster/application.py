"""The Ray Serve application: an `EngineReplica` deployment a model, and API servers in front of all of them.

    ingress -> API server (CPU only, any number) == ZeroMQ, msgpack ==> EngineReplica (any number a model)

Under `rayllm launch` API servers listen themselves, behind HAProxy, or behind Serve's own proxies if there is none;
under `serve run` and Serve's config files always behind the proxies.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ray
import yaml
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy
from ray.serve.schema import LoggingConfig

from rayllm import timeouts
from rayllm.config.options import EngineConfig, ModelConfig, ModelServerConfig, ServerConfig, check_names, make_models
from rayllm.config.resolved import ResolvedConfig, resolve
from rayllm.errors import ConfigError
from rayllm.hub import local_model
from rayllm.serve.cluster.api_server import ApiServer, FrontOptions, app_builder
from rayllm.serve.cluster.capacity import Capacity
from rayllm.serve.cluster.front import FrontModel
from rayllm.serve.cluster.replica import EngineReplica
from rayllm.serve.cluster.serve_compat import with_version
from rayllm.serve.http.auth import ApiKey, load_api_keys
from rayllm.serve.http.request_log import trace_endpoint
from rayllm.version import __version__

# A fraction of a core each, so that a whole deployment fits on two. It is a reservation, not a limit.
NUM_CPUS = 0.1
MAX_ONGOING = 100_000  # requests a replica: the scheduler queues, not Serve
AUTOSCALING_METRICS_S = 1.0
AUTOSCALING_LOOK_BACK_S = 5.0
MAX_API_SERVERS = 64


class ResolvedModel(NamedTuple):
    """One model of a deployment, its engine's options settled."""

    # In the API.
    name: str
    engine: ResolvedConfig
    server: ServerConfig
    # Ranks of a replica share a host: an autoscaler would add the smallest hosts, one a rank, if it had the choice.
    on_one_host: bool = False

    @property
    def num_gpus(self) -> int:
        """Of a replica."""
        return self.engine.tp if self.engine.device == "cuda" else 0

    @property
    def deployment_name(self) -> str:
        """In Serve. It ends up in paths, so it has only harmless characters."""
        plain = re.sub(r"[^A-Za-z0-9._-]", "-", self.name)
        digest = hashlib.sha256(self.name.encode()).hexdigest()[:8]
        return f"engine-{plain}" if plain == self.name else f"engine-{plain[:80]}-{digest}"


def resolve_models(models: Sequence[ModelConfig], capacity: Capacity) -> list[ResolvedModel]:
    """Settle every model's options. capacity: of the cluster.

    Raises ConfigError, also if all models together need more GPUs than there can be, and ModelError.
    """
    settled = [_resolve(model, capacity) for model in models]
    needed = {each.name: each.num_gpus * each.server.num_replicas for each in settled if each.num_gpus}
    total = sum(needed.values())
    if total > capacity.most_gpus:
        parts = ", ".join(f"{name} {count}" for name, count in needed.items())
        raise ConfigError(f"the replicas need {total} GPUs ({parts}); {capacity.describe()}")
    return settled


def _resolve(model: ModelConfig, capacity: Capacity) -> ResolvedModel:
    options, num_gpus = model.engine, capacity.num_gpus
    # More than can be added is refused for all models together. Where nobody knows what can be added, "auto" is what
    # the nodes that there are have.
    most = num_gpus if capacity.is_open and options.device != "cuda" else capacity.most_gpus
    if capacity.grows and most >= 1:
        num_gpus = max(num_gpus, options.tensor_parallel_size)
    engine = resolve(options, num_gpus)
    replicas = model.server.max_replicas or model.server.num_replicas
    return ResolvedModel(model.name, engine, model.server, capacity.has_hosts_for(replicas, engine.tp))


def make_application(
    models: Sequence[ResolvedModel],
    server: ServerConfig,
    *,
    keys: Sequence[ApiKey] = (),
    free_gpus: float | None = None,
    ingress_node: str | None = None,
    host_cores: Sequence[float] = (),
    grows: bool = False,
) -> serve.Application:
    """The Serve application.

    keys: of the API (see `load_api_keys`).
    free_gpus: that an update may use before it has freed any; None if that is not known.
    ingress_node: Ray's id of the node whose ingress passes connections on to API servers that listen themselves; None
    puts them behind Serve's proxies.
    host_cores: of each host that replicas may run on; this machine's if there are none yet. grows: there may be more.
    Raises ConfigError.
    """
    logs = LoggingConfig(enable_access_log=False, encoding=server.log_format.upper())
    common: dict[str, Any] = {
        "max_ongoing_requests": MAX_ONGOING,
        "graceful_shutdown_wait_loop_s": 0.1,
        "health_check_period_s": timeouts.HEALTH_PERIOD_S,
        "health_check_timeout_s": timeouts.HEALTH_TIMEOUT_S,
        "logging_config": logs,
    }
    engines = []
    for model in models:
        engine = serve.deployment(
            name=model.deployment_name,
            max_constructor_retry_count=1,  # a config or checkpoint that fails once fails again
            max_surge_percent=_surge_percent(model, free_gpus),
            graceful_shutdown_timeout_s=server.replica_drain_timeout + timeouts.KILL_S,
            **common,
            **autoscaling_options(model.server),
            **engine_placement(model.engine, model.on_one_host),
        )(EngineReplica)
        arguments = (model.engine, model.name, server.replica_drain_timeout, server.spot_notices)
        # Replicas that were started without autoscaling never report to it.
        made_of = repr((arguments, model.server.max_replicas is not None, _files(model, "*.json", "*.safetensors")))
        engines.append(with_version(engine, _version(made_of)).bind(*arguments))
    texts = [_files(model, "*.json", "*.jinja") for model in models]
    options = FrontOptions(
        models=[_front_model(model) for model in models],
        server=_without_key(server),
        keys=list(keys),
        trace_endpoint=trace_endpoint(server.otlp_endpoint, os.environ),
        ingress_node=ingress_node or "",
    )
    api = serve.deployment(
        name="ApiServer",
        num_replicas=server.num_api_servers or default_api_servers(host_cores or [os.cpu_count() or 1], grows),
        max_surge_percent=100,
        graceful_shutdown_timeout_s=server.api_server_drain_timeout + timeouts.KILL_S,
        ray_actor_options={"num_cpus": NUM_CPUS},
        **common,
    )
    if ingress_node is None:
        return with_version(api(serve.ingress(app_builder(options))()), _version(repr((options, texts)))).bind(*engines)
    return with_version(api(ApiServer), _version(repr((options, texts)))).bind(options, *engines)


class QueuedTokensPolicy:
    """How many replicas a model gets: Ray Serve's autoscaler, fed with the prompt tokens that wait.

    Each replica reports the load that all API servers have with it (`EngineReplica.record_autoscaling_stats`); Serve
    averages that, asks this, and applies the bounds and delays. Serve itself sees no requests, since they go past its
    handles, so its own count of them is of no use here.

    target_queued_tokens: that may wait for a replica.
    """

    def __init__(self, target_queued_tokens: int):
        self._target = target_queued_tokens

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """(replicas wanted, no state). Serve keeps it within its bounds, and applies the delays.

        Enough that no more than the target waits for each; and no fewer than it takes to run what is live, so that a
        replica is not removed only because its requests are past their prompts.
        """
        metrics = context.aggregated_metrics or {}
        queued = sum(metrics.get("queued_tokens", {}).values())
        batches = sum(metrics.get("batches", {}).values())
        return max(math.ceil(queued / self._target), math.ceil(batches), 1), {}


def autoscaling_options(server: ModelServerConfig) -> dict[str, Any]:
    """Deployment options: a fixed number of replicas, or autoscaling."""
    if server.max_replicas is None:
        return {"num_replicas": server.num_replicas}
    policy = AutoscalingPolicy(
        policy_function=QueuedTokensPolicy, policy_kwargs={"target_queued_tokens": server.target_queued_tokens}
    )
    config = AutoscalingConfig(
        min_replicas=server.num_replicas,
        max_replicas=server.max_replicas,
        metrics_interval_s=AUTOSCALING_METRICS_S,
        look_back_period_s=AUTOSCALING_LOOK_BACK_S,
        upscale_delay_s=server.upscale_delay,
        downscale_delay_s=server.downscale_delay,
        policy=policy,
    )
    return {"autoscaling_config": config}


def default_api_servers(host_cores: Sequence[float], grows: bool = False) -> int:
    """API servers for hosts of so many cores: a token costs one of them 137 us on a slow core, and on several hosts no
    single one is to hold all streams."""
    count = sum(min(max(int(cores) // 4, 1), 8) for cores in host_cores)
    return min(max(count, 2 if grows else 1), MAX_API_SERVERS)


def cores_by_host() -> list[float]:
    """Of each host of the Ray cluster that has CPUs for replicas."""
    nodes = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
    return [cores for cores in nodes if cores > 0]


def engine_placement(config: ResolvedConfig, on_one_host: bool = False) -> dict[str, Any]:
    """Deployment options that reserve the engine's resources.

    One rank runs in the replica itself, which then holds the GPU. More ranks, or executor "ray", are actors: bundle 0
    is the replica's, then one bundle a rank. PACK: on one host if it has the GPUs. on_one_host: on no other terms.
    """
    gpu = {"GPU": 1} if config.device == "cuda" else {}
    if config.executor == "local":
        return {"ray_actor_options": {"num_cpus": NUM_CPUS, "num_gpus": gpu.get("GPU", 0)}}
    return {
        "ray_actor_options": {"num_cpus": NUM_CPUS},
        "placement_group_bundles": [{"CPU": NUM_CPUS}] + [{"CPU": NUM_CPUS, **gpu}] * config.tp,
        "placement_group_strategy": "STRICT_PACK" if on_one_host else "PACK",
    }


def build_app(args: Mapping[str, Any]) -> serve.Application:
    """Application builder for Ray Serve: `serve run rayllm.serve:build_app model=/path max_model_len=4096`.

    args: options of EngineConfig and ServerConfig, and `models` (host, port and TLS are Serve's own there); values may
    be strings, as the command line has them. api_key is refused: Serve keeps and shows these arguments. Raises
    ConfigError or ModelError.
    """
    models, server = make_models(check_names({key: _from_text(key, value) for key, value in args.items()}))
    if server.api_key is not None:
        raise ConfigError("api_key would be shown by Ray Serve; use api_key_file or the environment's RAYLLM_API_KEY")
    if server.ingress == "haproxy":
        raise ConfigError(
            "ingress haproxy is for rayllm launch; here RAY_SERVE_ENABLE_HA_PROXY=1 does that, where Ray is started"
        )
    keys = load_api_keys(server, dict(os.environ))
    # `serve run` builds the application before it connects: this machine has to stand for the cluster then.
    knows = ray.is_initialized()
    num_gpus = ray.cluster_resources().get("GPU", 0) if knows else float(Path("/dev/nvidiactl").exists())
    free = ray.available_resources().get("GPU", 0) if knows else None
    resolved = resolve_models([local_model(model) for model in models], Capacity(num_gpus, is_open=True))
    cores = cores_by_host() if knows else []
    return make_application(resolved, server, keys=keys, free_gpus=free, host_cores=cores)


def _version(made_of: str) -> str:
    """What changes when the replicas of a deployment are to be replaced."""
    return hashlib.sha256(f"{__version__} {made_of}".encode()).hexdigest()[:16]


def _files(model: ResolvedModel, *patterns: str) -> list[tuple[str, int, int]]:
    """What changes when a checkpoint is replaced in its place: name, bytes and time of the last change of its files."""
    files = sorted(path for pattern in patterns for path in Path(model.engine.options.model).glob(pattern))
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]


def _surge_percent(model: ResolvedModel, free_gpus: float | None) -> int:
    """How many new replicas, of 100 old ones, an update starts before it stops old ones.

    All, if there is room. Without GPUs for even one, the old ones have to go first, one after the other.
    """
    if model.engine.device != "cuda" or free_gpus is None:
        return 100
    return min(100 * (int(free_gpus) // model.engine.tp) // model.server.num_replicas, 100)


def _front_model(model: ResolvedModel) -> FrontModel:
    options = model.engine.options
    return FrontModel(
        name=model.name,
        folder=options.model,
        server=_without_key(model.server),
        skip_tokenizer_init=options.skip_tokenizer_init,
        enable_lora=options.enable_lora,
        adapters=options.adapters,
        download_dir=options.download_dir,
    )


def _without_key(server: ServerConfig) -> ServerConfig:
    return server.model_copy(update={"api_key": None})


def _from_text(key: str, value: Any) -> Any:
    """An option's value, which may be the text of one that is no text."""
    field = {**EngineConfig.model_fields, **ServerConfig.model_fields}.get(key)
    is_text = field is not None and field.annotation in (str, str | None)
    return yaml.safe_load(value) if isinstance(value, str) and not is_text else value
