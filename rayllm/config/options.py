"""`EngineConfig` and `ServerConfig`: every option of an engine and of a deployment, checked once, in one place.

Options come from `LLM(...)`, the command line, a YAML file (`load_config_file`) or Ray Serve; all end here.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from rayllm.errors import ConfigError

OFFLINE_BATCHED_TOKENS = 16384  # a step, where nobody reads along
BUNDLED_MODEL = str(Path(__file__).parents[1] / "assets" / "tiny-pydoc")
MAX_MODELS = 64
MAX_REPLICAS = 256
MAX_NAME_CHARS = 256


class EngineConfig(BaseModel):
    """Options of one engine; names and meanings follow vLLM where it has them.

    model: folder of a Hugging Face checkpoint (config.json, *.safetensors, tokenizer.json).
    executor: "local" runs the worker in this process (tensor_parallel_size 1 only), "ray" runs one actor per
    rank; "auto" is local for one rank. device: "auto" is cuda where a GPU is visible. dtype: "auto" is the checkpoint's
    on GPUs (float32 checkpoints become bfloat16) and float32 on CPUs, where it is the faster one.
    max_model_len: tokens of prompt and output together; None takes the model's own limit.
    block_size: tokens a KV block. kv_cache_dtype: "auto" is the model's dtype; "fp8_e4m3" ("fp8" for short) and
    "fp8_e5m2" store keys and values in one byte, so the cache holds twice as many tokens as in 16 bits, less precisely.
    num_gpu_blocks_override: blocks of the device pool; None sizes it from gpu_memory_utilization (GPU) or 1 GiB a rank,
    at most what max_num_seqs full contexts need (CPU).
    swap_space: GiB of host memory a rank for KV blocks (0: none): of swapped sequences, and those that fell out of the
    prefix cache on the device. preemption_mode: what becomes of the KV of a sequence that has to make room: "recompute"
    forgets it, "swap" moves it to swap_space (as long as it fits there), "cost" does what takes less time, as measured
    when the engine starts.
    max_num_seqs: sequences running at once. max_num_batched_tokens: tokens computed in one step; more raise throughput
    and the pauses of running streams, so `LLM` and `rayllm bench offline` take 16384 if it is not given.
    target_itl_ms: milliseconds between the tokens of a running stream that are aimed at while prompts arrive: chunks of
    prompts become as short as that takes, at the expense of their own time to first token; None leaves them as long as
    max_num_batched_tokens.
    scheduling_policy: "fcfs", or "priority" (lower runs first). enforce_eager: no CUDA graphs; CPUs have none anyway.
    gpu_memory_utilization: share of a GPU's memory that the engine may take, others' use included; no effect on CPUs.
    load_format: "auto" reads safetensors; "dummy" fills seeded random weights.
    deterministic: a request's tokens and log-probabilities depend on the request alone, to the bit, for one model,
    dtype and device type: not on the batch, chunks, prefix-cache hits, preemption or CUDA graphs. Costs speed, on CPUs
    most; tensor_parallel_size 1 only.
    skip_tokenizer_init: token ids in, token ids out. seed: of unseeded requests and dummy weights.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model: str = BUNDLED_MODEL
    tensor_parallel_size: Literal[1, 2, 4, 8] = 1
    executor: Literal["auto", "local", "ray"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_model_len: int | None = Field(default=None, ge=1)
    block_size: int = Field(default=16, ge=1, le=1024)
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"] = "auto"
    num_gpu_blocks_override: int | None = Field(default=None, ge=1)
    swap_space: float = Field(default=0, ge=0, allow_inf_nan=False)
    preemption_mode: Literal["cost", "recompute", "swap"] = "cost"
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    max_num_seqs: int = Field(default=256, ge=1)
    max_num_batched_tokens: int = Field(default=8192, ge=1)
    target_itl_ms: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    enable_prefix_caching: bool = True
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    enforce_eager: bool = False
    deterministic: bool = False
    load_format: Literal["auto", "dummy"] = "auto"
    skip_tokenizer_init: bool = False
    seed: int = Field(default=0, ge=0, lt=2**63)

    @field_validator("preemption_mode")
    @classmethod
    def _room_to_swap(cls, value: str, info: ValidationInfo) -> str:
        if value == "swap" and not info.data.get("swap_space", 1):
            raise PydanticCustomError("room_to_swap", 'must be "cost" or "recompute" if swap_space is 0')
        return value

    @field_validator("deterministic")
    @classmethod
    def _one_rank(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("tensor_parallel_size", 1) > 1:
            raise PydanticCustomError(
                "one_rank",
                "must be false if tensor_parallel_size is above 1, because the order in which ranks' sums are added "
                "depends on how many tokens are in a step",
            )
        return value


class ModelServerConfig(BaseModel):
    """How one model is served; each of several models may have its own.

    served_model_name: the model's name in the API; None takes the folder's name. num_replicas: engines of the model,
    each with its own driver and workers; the least number if max_replicas is given. max_replicas: replicas are added
    while the prompt tokens that wait exceed target_queued_tokens a replica, up to this number; None keeps num_replicas.
    target_queued_tokens: prompt tokens that may wait for a replica before max_replicas asks for one more.
    upscale_delay: seconds that more replicas must be wanted before they are added. downscale_delay: seconds that fewer
    must do before one is drained. max_queued_requests: completions that may live beyond the max_num_seqs that each
    replica runs; more get a 429. max_queued_tokens: prompt tokens of requests without a first token; more get a 429.
    tool_call_parser: how the model writes tool calls: "hermes" is <tool_call>{"name", "arguments"}</tool_call> (Hermes,
    Qwen), "llama3" a bare {"name", "parameters"}; "auto" is what its chat template shows, if that is one of them.
    reasoning_parser: "think" if the model may begin with <think>reasoning</think>; "auto" if its chat template knows
    the tag.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    served_model_name: str | None = Field(default=None, min_length=1, max_length=MAX_NAME_CHARS)
    num_replicas: int = Field(default=1, ge=1, le=MAX_REPLICAS)
    max_replicas: int | None = Field(default=None, ge=1, le=MAX_REPLICAS)
    target_queued_tokens: int = Field(default=16384, ge=1)
    upscale_delay: float = Field(default=10, ge=0, le=3600)
    downscale_delay: float = Field(default=300, ge=0, le=86400)
    max_queued_requests: int = Field(default=4096, ge=0)
    max_queued_tokens: int = Field(default=2**24, ge=1)
    tool_call_parser: Literal["auto", "hermes", "llama3", "none"] = "auto"
    reasoning_parser: Literal["auto", "think", "none"] = "auto"

    @field_validator("max_replicas")
    @classmethod
    def _not_fewer_than_the_least(cls, value: int | None, info: ValidationInfo) -> int | None:
        least = info.data.get("num_replicas", 1)
        if value is not None and value < least:
            raise PydanticCustomError("fewer", "must be at least num_replicas ({least})", {"least": least})
        return value


class ServerConfig(ModelServerConfig):
    """Options of an HTTP deployment, and of each model that has none of its own.

    num_api_servers: replicas of the CPU-only front; None is one for every four cores of this machine, at least one and
    at most eight. ingress: what takes connections and chooses a front: "serve" is Ray Serve's own proxy, "haproxy"
    passes several times as many tokens a second; "auto" is haproxy where there is one and Ray starts with the server.
    api_key: one key that clients must send; better in api_key_file or the environment, as command lines are visible to
    others. api_key_file: keys that clients may send, one a line, an optional name after each. queue_timeout: seconds
    from a request's arrival until the engine starts it, else a 408; 0 is no limit, here and below. first_token_timeout:
    seconds until each prompt's first token. request_timeout: seconds until the answer is complete. drain_timeout:
    seconds that running requests may go on when the server stops. replica_drain_timeout: seconds that they may go on in
    a replica that is replaced or no longer needed, while others take the new requests. log_format: of the request log,
    "json" is one object a line. otlp_endpoint: URL of an OpenTelemetry collector for traces (OTLP over HTTP); None
    takes the environment's OTEL_EXPORTER_OTLP_ENDPOINT.
    """

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    num_api_servers: int | None = Field(default=None, ge=1, le=64)
    ingress: Literal["auto", "haproxy", "serve"] = "auto"
    api_key: str | None = Field(default=None, repr=False, exclude=True)
    api_key_file: str | None = None
    queue_timeout: float = Field(default=0, ge=0, allow_inf_nan=False)
    first_token_timeout: float = Field(default=0, ge=0, allow_inf_nan=False)
    request_timeout: float = Field(default=0, ge=0, allow_inf_nan=False)
    drain_timeout: float = Field(default=5, ge=0, le=3600)
    replica_drain_timeout: float = Field(default=600, ge=0, le=86400)
    log_format: Literal["text", "json"] = "text"
    otlp_endpoint: str | None = None


class ModelConfig(NamedTuple):
    """One model of a deployment. server: the deployment's options with this model's own in their place."""

    engine: EngineConfig
    server: ServerConfig

    @property
    def name(self) -> str:
        """In the API."""
        return self.server.served_model_name or Path(self.engine.model).resolve().name


ConfigT = TypeVar("ConfigT", bound=BaseModel)


def make_config(kind: type[ConfigT], options: dict[str, Any]) -> ConfigT:
    """Build a config from options. Raises ConfigError that names the option at fault and its limit."""
    try:
        return kind(**options)
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(kind, e) for e in error.errors())) from None


class FileOptions(NamedTuple):
    """Options of a deployment's file or of Serve's arguments, not yet checked beyond their names.

    engine, server: of all models. models: (engine options, server options) of each, empty if there is only one.
    """

    engine: dict[str, Any]
    server: dict[str, Any]
    models: list[tuple[dict[str, Any], dict[str, Any]]]


def load_config_file(path: str) -> FileOptions:
    """Read a deployment's YAML. Raises ConfigError for unknown keys."""
    try:
        loaded = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"config file {path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} is not valid YAML: {error}") from None
    if loaded is None:
        loaded = {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"config file {path} must hold a mapping of options, not {type(loaded).__name__}")
    try:
        return split_options(loaded)
    except ConfigError as error:
        raise ConfigError(f"config file {path}: {error}") from None


def split_options(options: dict[str, Any]) -> FileOptions:
    """Sort options by what they belong to; `models` is a list of mappings. Raises ConfigError for unknown ones."""
    rest = {key: value for key, value in options.items() if key != "models"}
    engine, server = _split(rest, ServerConfig)
    models = []
    if "models" in options:
        listed = options["models"]
        if not isinstance(listed, list) or not 1 <= len(listed) <= MAX_MODELS:
            raise ConfigError(f"models must be a list of 1 to {MAX_MODELS} mappings")
        for field in ("model", "served_model_name"):
            if field in rest:
                raise ConfigError(f"{field} belongs to each of models, not beside them")
        for number, each in enumerate(listed):
            if not isinstance(each, dict):
                raise ConfigError(f"models[{number}] must be a mapping of options, not {type(each).__name__}")
            try:
                models.append(_split(each, ModelServerConfig))
            except ConfigError as error:
                raise ConfigError(f"models[{number}]: {error}") from None
    return FileOptions(engine, server, models)


def make_models(
    options: FileOptions, overrides: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
) -> tuple[list[ModelConfig], ServerConfig]:
    """The models of a deployment, and the options of all of it. overrides: engine and server options above all others.

    Raises ConfigError, also for two models of one name.
    """
    engine, server = options.engine, options.server
    flags_engine, flags_server = overrides
    whole = make_config(ServerConfig, server | flags_server)
    if options.models:
        for field in ("model", "served_model_name"):
            if field in flags_engine or field in flags_server:
                raise ConfigError(f"{field} cannot be given for several models at once")
    models = []
    for number, (own_engine, own_server) in enumerate(options.models or [({}, {})]):
        try:
            models.append(
                ModelConfig(
                    make_config(EngineConfig, engine | own_engine | flags_engine),
                    make_config(ServerConfig, server | own_server | flags_server),
                )
            )
        except ConfigError as error:
            raise ConfigError(f"models[{number}]: {error}" if options.models else str(error)) from None
    names = [model.name for model in models]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two models have the name {name!r}; give them served_model_name")
    return models, whole


def _split(options: dict[str, Any], kind: type[BaseModel]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(engine options, options of `kind`). Raises ConfigError."""
    engine: dict[str, Any] = {}
    server: dict[str, Any] = {}
    for key, value in options.items():
        if key in EngineConfig.model_fields:
            engine[key] = value
        elif key in kind.model_fields:
            server[key] = value
        elif key in ServerConfig.model_fields:
            raise ConfigError(f"{key} belongs to the whole deployment, not to one model")
        else:
            raise ConfigError(_unknown(str(key), [*EngineConfig.model_fields, *kind.model_fields]))
    return engine, server


def _explain(kind: type[BaseModel], error: Any) -> str:
    name = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return _unknown(name, list(kind.model_fields))
    message = error["msg"][0].lower() + error["msg"][1:]
    field = kind.model_fields.get(name)
    if field is not None and field.exclude:  # a secret
        return f"{name}: {message}"
    return f"{name}: {message}, not {error['input']!r}"


def _unknown(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"unknown option {name!r}" + (f" (did you mean {near[0]!r}?)" if near else "")
