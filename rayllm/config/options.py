"""Every option of an engine and of a deployment: its name, type, limits, default and description, in one place.

`LLM(...)`, the flags of the command line, YAML files (`load_config_file`) and the arguments of `serve run` are all made
from the classes here, and checked by them.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from rayllm.errors import ConfigError

OFFLINE_BATCHED_TOKENS = 16384  # the default of max_num_batched_tokens where no client reads along
BUNDLED_MODEL = str(Path(__file__).parents[1] / "assets" / "tiny-pydoc")
MAX_MODELS = 64
MAX_REPLICAS = 256
MAX_NAME_CHARS = 256


class EngineConfig(BaseModel):
    """Options of one engine; names and meanings follow vLLM where it has them."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())

    model: str = Field(
        default=BUNDLED_MODEL,
        description="Folder of a Hugging Face checkpoint: config.json, *.safetensors, tokenizer.json",
    )
    tensor_parallel_size: Literal[1, 2, 4, 8] = Field(
        default=1, description="GPUs or CPU processes that share the weights"
    )
    executor: Literal["auto", "local", "ray"] = Field(
        default="auto",
        description="Workers: local is one, in this process; ray is one actor a rank; auto is local for one",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="What the model runs on; auto is cuda where a GPU is visible"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="Type of weights and activations; auto is the checkpoint's on GPUs (float32 checkpoints become "
        "bfloat16), and float32 on CPUs, where it is the faster one",
    )
    max_model_len: int | None = Field(
        default=None, ge=1, description="Most tokens of prompt and output together; the model's own limit if absent"
    )
    block_size: int = Field(default=16, ge=1, le=1024, description="Tokens of a KV cache block")
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"] = Field(
        default="auto",
        description="Type of the KV cache; auto is dtype; fp8_e4m3 (fp8 for short) and fp8_e5m2 hold twice as many "
        "tokens as 16 bits do, less precisely",
    )
    num_gpu_blocks_override: int | None = Field(
        default=None,
        ge=1,
        description="Blocks of the KV cache; if absent, what fits into gpu_memory_utilization on GPUs, and on CPUs "
        "into 1 GiB a rank, at most what max_num_seqs full contexts need",
    )
    swap_space: float = Field(
        default=0,
        ge=0,
        description="GiB of host memory a rank for KV blocks of preempted sequences and those that the prefix cache "
        "on the device has no room for",
    )
    preemption_mode: Literal["cost", "recompute", "swap"] = Field(
        default="cost",
        description="What becomes of the KV cache of a preempted sequence: recompute drops it, swap moves it to "
        "swap_space while it fits, cost does what takes less time as measured at the start",
    )
    gpu_memory_utilization: float = Field(
        default=0.9,
        gt=0,
        le=1,
        description="Share of a GPU's memory that may be in use, others' use included; not for CPUs",
    )
    max_num_seqs: int = Field(default=256, ge=1, description="Most sequences that run at once")
    max_num_batched_tokens: int = Field(
        default=8192,
        ge=1,
        description="Most tokens computed in one step; more raise the throughput, and the pauses of running streams. "
        f"LLM and rayllm bench offline take {OFFLINE_BATCHED_TOKENS} if it is absent",
    )
    target_itl_ms: float | None = Field(
        default=None,
        gt=0,
        description="Milliseconds between the tokens of a running stream to aim at while prompts arrive; their chunks "
        "become as short as that takes, and their first tokens later",
    )
    enable_prefix_caching: bool = Field(default=True, description="Share KV blocks between prompts that begin alike")
    scheduling_policy: Literal["fcfs", "priority"] = Field(
        default="fcfs", description="Which request runs first: fcfs the oldest, priority the one of the lowest number"
    )
    enforce_eager: bool = Field(default=False, description="Use no CUDA graphs; CPUs have none anyway")
    deterministic: bool = Field(
        default=False,
        description="Make the tokens and log-probabilities of a request depend on nothing but the request, to the bit, "
        "for one model, dtype and device type; costs speed, most on CPUs; not with tensor_parallel_size above 1",
    )
    load_format: Literal["auto", "dummy"] = Field(
        default="auto", description="auto reads *.safetensors; dummy makes random weights from the seed"
    )
    skip_tokenizer_init: bool = Field(
        default=False, description="Load no tokenizer; prompts and outputs are token ids only"
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="Seed of requests that have none, and of dummy weights")

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
    """How one model is served; each of several models may have its own."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())

    served_model_name: str | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_NAME_CHARS,
        description="Name in the API; that of the model's folder if absent",
    )
    num_replicas: int = Field(
        default=1, ge=1, le=MAX_REPLICAS, description="Engines of the model; the least number if max_replicas is given"
    )
    max_replicas: int | None = Field(
        default=None,
        ge=1,
        le=MAX_REPLICAS,
        description="Most engines of the model: they are added while more than target_queued_tokens wait for each; "
        "num_replicas if absent",
    )
    target_queued_tokens: int = Field(
        default=16384, ge=1, description="Prompt tokens that may wait for an engine before max_replicas allows one more"
    )
    upscale_delay: float = Field(
        default=10, ge=0, le=3600, description="Seconds that more replicas must be wanted before they are added"
    )
    downscale_delay: float = Field(
        default=300, ge=0, le=86400, description="Seconds that fewer replicas must be enough before one is drained"
    )
    max_queued_requests: int = Field(
        default=4096,
        ge=0,
        description="Completions that may wait beyond the max_num_seqs of each replica; more get a 429",
    )
    max_queued_tokens: int = Field(
        default=2**24, ge=1, description="Prompt tokens of requests without a first token; more get a 429"
    )
    tool_call_parser: Literal["auto", "hermes", "llama3", "none"] = Field(
        default="auto",
        description='How the model writes tool calls: hermes as <tool_call>{"name", "arguments"}</tool_call> (Hermes, '
        'Qwen), llama3 as a bare {"name", "parameters"}; auto is what its chat template shows, if either',
    )
    reasoning_parser: Literal["auto", "think", "none"] = Field(
        default="auto", description="think if outputs may begin with <think>; auto if the chat template has that tag"
    )

    @field_validator("max_replicas")
    @classmethod
    def _not_fewer_than_the_least(cls, value: int | None, info: ValidationInfo) -> int | None:
        least = info.data.get("num_replicas", 1)
        if value is not None and value < least:
            raise PydanticCustomError("fewer", "must be at least num_replicas ({least})", {"least": least})
        return value


class ServerConfig(ModelServerConfig):
    """Options of an HTTP deployment, and of each model that has none of its own."""

    host: str = Field(default="127.0.0.1", description="Address to listen on; 0.0.0.0 is all of this machine")
    port: int = Field(default=8000, ge=0, le=65535, description="Port to listen on")
    num_api_servers: int | None = Field(
        default=None,
        ge=1,
        le=64,
        description="Processes that speak HTTP, without GPUs; if absent, one for every four cores of this machine, "
        "at least one and at most eight",
    )
    ingress: Literal["auto", "haproxy", "serve"] = Field(
        default="auto",
        description="What takes connections and chooses an API server: serve is the proxy of Ray Serve; haproxy passes "
        "several times as many tokens a second; auto is haproxy if it is installed and Ray starts with the server",
    )
    ssl_certfile: str | None = Field(default=None, description="PEM file of certificates, to listen with TLS")
    ssl_keyfile: str | None = Field(default=None, description="PEM file of the key of ssl_certfile, if it is not in it")
    api_key: str | None = Field(
        default=None,
        repr=False,
        exclude=True,
        description="Key that clients must send; others can see flags, so better use api_key_file or RAYLLM_API_KEY",
    )
    api_key_file: str | None = Field(
        default=None, description="File of keys that clients may send: one a line, with a name after it if wanted"
    )
    queue_timeout: float = Field(
        default=0,
        ge=0,
        description="Seconds from a request's arrival until its engine starts it, else it gets a 408; 0 is no limit",
    )
    first_token_timeout: float = Field(
        default=0, ge=0, description="Seconds until the first token of each prompt; 0 is no limit"
    )
    request_timeout: float = Field(default=0, ge=0, description="Seconds until the answer is complete; 0 is no limit")
    drain_timeout: float = Field(
        default=5, ge=0, le=3600, description="Seconds that running requests may go on when the server stops"
    )
    replica_drain_timeout: float = Field(
        default=600,
        ge=0,
        le=86400,
        description="Seconds that running requests may go on in a replica that is taken away",
    )
    log_format: Literal["text", "json"] = Field(default="text", description="Request log; json is one object a line")
    otlp_endpoint: str | None = Field(
        default=None,
        description="URL of an OpenTelemetry collector for traces (OTLP over HTTP); OTEL_EXPORTER_OTLP_ENDPOINT of the "
        "environment if absent",
    )

    @field_validator("ssl_keyfile")
    @classmethod
    def _with_certificates(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and info.data.get("ssl_certfile") is None:
            raise PydanticCustomError("no_certificates", "needs ssl_certfile")
        return value


class ModelConfig(NamedTuple):
    """One model of a deployment."""

    engine: EngineConfig
    server: ServerConfig  # the deployment's options, with the model's own in their place

    @property
    def name(self) -> str:
        """The model's name in the API."""
        return self.server.served_model_name or Path(self.engine.model).resolve().name


ConfigT = TypeVar("ConfigT", bound=BaseModel)


def make_config(kind: type[ConfigT], options: dict[str, Any]) -> ConfigT:
    """Build a config from options. Raises ConfigError that names the option at fault and its limit."""
    try:
        return kind(**options)
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(kind, e) for e in error.errors())) from None


class ModelOptions(NamedTuple):
    """Options of one model, not yet checked beyond their names."""

    engine: dict[str, Any]
    server: dict[str, Any]


class FileOptions(NamedTuple):
    """Options of a deployment's file, of flags or of Serve's arguments, not yet checked beyond their names."""

    engine: dict[str, Any]  # of all models
    server: dict[str, Any]  # of the deployment, and of all models
    models: list[ModelOptions]  # of each of several models; empty if there is only one


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
    options: FileOptions, flags: FileOptions = FileOptions({}, {}, [])
) -> tuple[list[ModelConfig], ServerConfig]:
    """The models of a deployment, and the options of all of it. flags: options that are above those of the file.

    Raises ConfigError, also for two models of one name.
    """
    if options.models:
        for field in ("model", "served_model_name"):
            if field in flags.engine or field in flags.server:
                raise ConfigError(f"{field} cannot be given for several models at once")
    whole = make_config(ServerConfig, options.server | flags.server)
    models = []
    for number, own in enumerate(options.models or [ModelOptions({}, {})]):
        try:
            engine = make_config(EngineConfig, options.engine | own.engine | flags.engine)
            server = make_config(ServerConfig, options.server | own.server | flags.server)
        except ConfigError as error:
            raise ConfigError(f"models[{number}]: {error}" if options.models else str(error)) from None
        models.append(ModelConfig(engine, server))
    names = [model.name for model in models]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two models have the name {name!r}; give them served_model_name")
    return models, whole


def _split(options: dict[str, Any], kind: type[BaseModel]) -> ModelOptions:
    """Tell options of the engine from options of `kind`. Raises ConfigError."""
    split = ModelOptions({}, {})
    for key, value in options.items():
        if key in EngineConfig.model_fields:
            split.engine[key] = value
        elif key in kind.model_fields:
            split.server[key] = value
        elif key in ServerConfig.model_fields:
            raise ConfigError(f"{key} belongs to the whole deployment, not to one model")
        else:
            raise ConfigError(_unknown(str(key), [*EngineConfig.model_fields, *kind.model_fields]))
    return split


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
