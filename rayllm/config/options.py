"""Every option of an engine and of a deployment: its name, type, limits, default and description, in one place.

`LLM(...)`, the flags of the command line, YAML files (`load_config_file`) and the arguments of `serve run` are all made
from the classes here, and checked by them.
"""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from rayllm.errors import ConfigError

OFFLINE_BATCHED_TOKENS = 16384  # the default of max_num_batched_tokens where no client reads along
BUNDLED_MODEL = str(Path(__file__).parents[1] / "assets" / "tiny-pydoc")
MAX_MODELS = 64
MAX_REPLICAS = 256
MAX_NAME_CHARS = 256
# The docstring below a field is its description: what help texts and the documentation of `LLM` say.
OPTIONS = ConfigDict(
    extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=(), use_attribute_docstrings=True
)
# A model's own: not for several at once.
OWN_FIELDS = ("model", "revision", "served_model_name")
HUB_NAME = r"[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)?"


def _check_origins(origins: list[str]) -> list[str]:
    for origin in origins:
        if not re.fullmatch(r"\*|[a-z][a-z0-9+.-]*://[^/\s]+", origin):
            raise ValueError("an origin is * or like https://example.org, without a path")
    return origins


def _check_source(name: str) -> str:
    if not re.fullmatch(r"auto|aws|gcp|none|[\w.]+:\w+", name):
        raise ValueError("must be auto, aws, gcp, none, or module:function")
    return name


def _read_modules(modules: Any) -> Any:
    """A mapping of names to paths, as programs and files may have it, as a list of name=path."""
    return [f"{name}={path}" for name, path in modules.items()] if isinstance(modules, dict) else modules


def check_adapter_name(name: str) -> None:
    """Raise ValueError for what cannot be the name of an adapter in the API."""
    if not re.fullmatch(r"[\w.:/@+-]+", name) or len(name) > MAX_NAME_CHARS:
        raise ValueError(f"an adapter's name has 1 to {MAX_NAME_CHARS} letters, digits and _.:/@+-")


def _check_modules(modules: list[str]) -> list[str]:
    pairs = [each.partition("=") for each in modules]
    for name, mark, path in pairs:
        if not mark or not path:
            raise ValueError("an adapter is name=path")
        check_adapter_name(name)
    if len({name for name, _mark, _path in pairs}) < len(pairs):
        raise ValueError("two adapters have one name")
    return [f"{name}={path if is_hub_name(path) else os.path.abspath(path)}" for name, _mark, path in pairs]


def _absolute(path: str | None) -> str | None:
    return None if path is None else os.path.abspath(_check_path(path))  # API servers have other working directories


def _check_path(path: str) -> str:
    if not path or "\0" in path:
        raise ValueError("must not be empty or have NUL in it")
    return path


class EngineConfig(BaseModel):
    """Options of one engine; names and meanings follow vLLM where it has them."""

    model_config = OPTIONS

    model: Annotated[str, AfterValidator(_check_path)] = BUNDLED_MODEL
    """Folder of a Hugging Face checkpoint (config.json, *.safetensors, tokenizer.json); if there is no such folder, a
    model's name on the Hugging Face Hub, as org/name"""
    revision: str | None = Field(default=None, min_length=1)
    """Branch, tag or commit of a model's name on the hub; the main branch if absent"""
    download_dir: Annotated[str | None, AfterValidator(_absolute)] = None
    """Folder of the cache for models and adapters of the hub; if absent, the one that other tools use too
    (HF_HUB_CACHE, HF_HOME)"""
    tensor_parallel_size: Literal[1, 2, 4, 8] = 1
    """GPUs or CPU processes that share the weights"""
    enable_expert_parallel: bool = False
    """Share experts as wholes among the tensor_parallel_size ranks, and not each expert's width; for mixtures of
    experts. One rank has all of them either way"""
    executor: Literal["auto", "local", "ray"] = "auto"
    """Workers: local is one, in this process; ray is one actor a rank; auto is local for one"""
    standby_ranks: Literal["auto", "none"] = "auto"
    """Processes that wait to take over from workers that fail, with all imported and the weights mapped: auto is one
    for each worker that is an actor; with none, new workers start and load the model, and streams pause for longer"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What the model runs on; auto is cuda where a GPU is visible"""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights and activations; auto is the checkpoint's on GPUs (float32 checkpoints become bfloat16), and
    float32 on CPUs, where it is the faster one"""
    quantization: Literal["auto", "fp8", "none"] = "auto"
    """Bits of weights in memory: auto keeps those of a quantised checkpoint where products with them are there; fp8
    rounds the linear layers of other checkpoints while they load, and their activations; none turns all into dtype"""
    max_model_len: int | None = Field(default=None, ge=1)
    """Most tokens of prompt and output together; if absent, the model's own limit, or the context of its pretraining if
    its positions are scaled by length (longrope, dynamic)"""
    block_size: int = Field(default=16, ge=1, le=1024)
    """Tokens of a KV cache block; models with a recurrent state have the least multiple of it at which a block has room
    for states"""
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"] = "auto"
    """Type of the KV cache; auto is dtype; fp8_e4m3 (fp8 for short) and fp8_e5m2 hold twice as many tokens as 16 bits
    do, less precisely"""
    num_gpu_blocks_override: int | None = Field(default=None, ge=1, lt=2**31)
    """Blocks of the KV cache; if absent, what fits into gpu_memory_utilization on GPUs, and on CPUs into 1 GiB a rank,
    at most what max_num_seqs full contexts need"""
    swap_space: float = Field(default=0, ge=0, le=2**20)
    """GiB of host memory a rank for KV blocks of preempted sequences and those that the prefix cache on the device has
    no room for"""
    preemption_mode: Literal["cost", "recompute", "swap"] = "cost"
    """What becomes of the KV cache of a preempted sequence: recompute drops it, swap moves it to swap_space while it
    fits, cost does what takes less time as measured at the start"""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of a GPU's memory that may be in use, others' use included; not for CPUs"""
    max_num_seqs: int | None = Field(default=None, ge=1, le=2**20)
    """Most sequences that run at once; if absent, 32 on CPUs, and on GPUs 1024, 512 or 256, as many as take little of
    the memory for the KV cache"""
    max_num_batched_tokens: int | None = Field(default=None, ge=1, le=2**24)
    """Most tokens computed in one step; more raise the throughput, and the pauses of running streams; if absent, 8192
    on GPUs, and 128 on CPUs, where other streams wait for longer ones. LLM and rayllm bench offline take 16384 then"""
    target_itl_ms: float | None = Field(default=None, gt=0)
    """Milliseconds between the tokens of a running stream to aim at while prompts arrive; their chunks become as short
    as that takes, and their first tokens later"""
    enable_prefix_caching: bool = True
    """Share KV blocks between prompts that begin alike"""
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    """Which request runs first: fcfs the oldest, priority the one of the lowest number"""
    enforce_eager: bool = False
    """Use no CUDA graphs; CPUs have none anyway"""
    deterministic: bool = False
    """Make the tokens and log-probabilities of a request depend on nothing but the request, to the bit, for one model,
    dtype, device type, tensor_parallel_size and enable_expert_parallel; costs speed, most on CPUs"""
    load_format: Literal["auto", "dummy"] = "auto"
    """auto reads *.safetensors; dummy makes random weights from the seed"""
    generation_config: Literal["auto", "none"] = "auto"
    """Sampling defaults of requests that say nothing: auto takes temperature, top_p, top_k, min_p, repetition_penalty
    and max_new_tokens of the model's generation_config.json; none leaves them out"""
    skip_tokenizer_init: bool = False
    """Load no tokenizer; prompts and outputs are token ids only"""
    enable_lora: bool = False
    """Take adapters (LoRA, in PEFT's form) at the start and while requests run"""
    lora_modules: Annotated[list[str], BeforeValidator(_read_modules), AfterValidator(_check_modules)] = []
    """Adapters to load at the start, each as name=path of its folder, or name=org/name of one on the hub; requests ask
    for one by its name as the model"""
    max_loras: int = Field(default=8, ge=1, le=256)
    """Most adapters that the requests of one step have; each takes memory for max_lora_rank on the device"""
    max_lora_rank: int = Field(default=16, ge=1, le=512)
    """Largest rank of an adapter"""
    max_cpu_loras: int = Field(default=128, ge=1, le=4096)
    """Most adapters that are loaded at once, in host memory; one more is refused"""
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    """Makes the noise of requests without a seed follow from their number, in the order in which LLM or an API server
    got them, so that it is the same after every start; random if absent. Also of dummy weights, 0 if absent"""

    @property
    def adapters(self) -> dict[str, str]:
        """The paths of lora_modules by name."""
        return dict(each.split("=", 1) for each in self.lora_modules)


class ModelServerConfig(BaseModel):
    """How one model is served; each of several models may have its own."""

    model_config = OPTIONS

    served_model_name: str | None = Field(default=None, min_length=1, max_length=MAX_NAME_CHARS)
    """Name in the API; if absent, the model's name on the hub, or that of its folder"""
    num_replicas: int = Field(default=1, ge=1, le=MAX_REPLICAS)
    """Engines of the model; the least number if max_replicas is given"""
    max_replicas: int | None = Field(default=None, ge=1, le=MAX_REPLICAS)
    """Most engines of the model: they are added while more than target_queued_tokens wait for each; num_replicas if
    absent"""
    target_queued_tokens: int = Field(default=16384, ge=1)
    """Prompt tokens that may wait for an engine before max_replicas allows one more"""
    upscale_delay: float = Field(default=10, ge=0, le=3600)
    """Seconds that more replicas must be wanted before they are added"""
    downscale_delay: float = Field(default=300, ge=0, le=86400)
    """Seconds that fewer replicas must be enough before one is drained"""
    max_queued_requests: int = Field(default=4096, ge=0)
    """Completions that may wait beyond the max_num_seqs of each replica; more get a 429"""
    max_queued_tokens: int = Field(default=2**24, ge=1)
    """Prompt tokens of requests without a first token; more get a 429"""
    tool_call_parser: Literal[
        "auto",
        "hermes",
        "qwen3_coder",
        "llama3",
        "llama4",
        "mistral",
        "deepseek",
        "deepseek_v32",
        "glm",
        "minimax",
        "gemma4",
        "gpt_oss",
        "none",
    ] = "auto"
    """The family of models whose form of tool calls the model writes; auto is what its chat template shows"""
    reasoning_parser: Literal["auto", "think", "mistral", "gemma4", "gpt_oss", "none"] = "auto"
    """How the model reasons: think between <think> and </think>, mistral between [THINK] and [/THINK], gemma4 and
    gpt_oss on a channel of its own; auto is what its chat template shows"""


class ServerConfig(ModelServerConfig):
    """Options of an HTTP deployment, and of each model that has none of its own."""

    host: str = Field(default="127.0.0.1", min_length=1)
    """Address to listen on; 0.0.0.0 is all of this machine"""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on"""
    num_api_servers: int | None = Field(default=None, ge=1, le=64)
    """Processes that speak HTTP, without GPUs; if absent, one for every four cores of each host, at least one and at
    most eight for each"""
    ingress: Literal["auto", "haproxy", "serve"] = "auto"
    """What takes connections and chooses an API server: serve is the proxy of Ray Serve; haproxy passes several times
    as many tokens a second; auto is haproxy if it is installed"""
    ssl_certfile: str | None = None
    """PEM file of certificates, to listen with TLS"""
    ssl_keyfile: str | None = None
    """PEM file of the key of ssl_certfile, if it is not in it"""
    api_key: str | None = Field(default=None, repr=False, exclude=True)
    """Key that clients must send; others can see flags, so better use api_key_file or RAYLLM_API_KEY"""
    api_key_file: str | None = None
    """File of keys that clients may send: one a line, with a name after it if wanted"""
    allowed_origins: Annotated[list[str], AfterValidator(_check_origins)] = []
    """Origins whose web pages may send requests, as https://example.org, or *; if none, no other page than the server's
    own may"""
    strict_fields: bool = False
    """Refuse requests with unknown fields, unless they say strict_fields: false themselves; else such fields are
    ignored, and named in the response header x-rayllm-ignored"""
    queue_timeout: float = Field(default=0, ge=0)
    """Seconds from a request's arrival until its engine starts it, else it gets a 408; 0 is no limit"""
    first_token_timeout: float = Field(default=0, ge=0)
    """Seconds until the first token of each prompt; 0 is no limit"""
    request_timeout: float = Field(default=0, ge=0)
    """Seconds until the answer is complete; 0 is no limit"""
    state_dir: Annotated[str | None, AfterValidator(_absolute)] = None
    """Folder of stored responses, files and batches, for all API servers of a host, or of several hosts that share it;
    batches in it go on after a restart. If absent, each host has one of its own, which goes with its last API server"""
    response_ttl: float | None = Field(default=None, gt=0)
    """Seconds that a response is stored; if absent, an hour, and 30 days in a state_dir"""
    max_responses: int = Field(default=10_000, ge=1, le=1_000_000)
    """Most responses that are stored; the oldest go first"""
    response_space: float = Field(default=1, gt=0)
    """GiB that stored responses may have; the oldest go first"""
    max_file_mib: int = Field(default=200, ge=1)
    """MiB of a file that a client uploads"""
    file_space: float = Field(default=10, gt=0)
    """GiB that all files may have, results of batches included; uploads beyond are refused"""
    files_ttl: float = Field(default=30 * 86400, gt=0)
    """Seconds that files, and batches that have ended, are kept; clients may ask for less"""
    drain_timeout: float = Field(default=5, ge=0, le=3600)
    """Seconds that running requests may go on when the server stops"""
    replica_drain_timeout: float = Field(default=60, ge=0, le=86400)
    """Seconds that running requests may go on in a replica that is taken away, before they move to another one"""
    api_server_drain_timeout: float = Field(default=600, ge=0, le=86400)
    """Seconds that running requests may go on in an API server that is taken away, before they end with an error"""
    spot_notices: Annotated[str, AfterValidator(_check_source)] = "auto"
    """Who says that the cloud takes a host away: aws, gcp, none, or module:function, which returns the seconds until
    then or None; auto is the cloud that the host is of, if it is one of these"""
    log_format: Literal["text", "json"] = "text"
    """Request log; json is one object a line"""
    otlp_endpoint: str | None = None
    """URL of an OpenTelemetry collector for traces (OTLP over HTTP); OTEL_EXPORTER_OTLP_ENDPOINT of the environment if
    absent"""


class ModelConfig(NamedTuple):
    """One model of a deployment."""

    engine: EngineConfig
    server: ServerConfig  # the deployment's options, with the model's own in their place

    @property
    def name(self) -> str:
        """The model's name in the API."""
        if self.server.served_model_name is not None:
            return self.server.served_model_name
        return self.engine.model if is_hub_name(self.engine.model) else Path(self.engine.model).resolve().name


ConfigT = TypeVar("ConfigT", bound=BaseModel)


def is_hub_name(model: str) -> bool:
    """Whether a `model` is one by its name on the hub: of the form org/name or name, and no file or folder here."""
    return re.fullmatch(HUB_NAME, model) is not None and not os.path.exists(model)


def make_config(kind: type[ConfigT], options: dict[str, Any]) -> ConfigT:
    """Build a config from options. Raises ConfigError that names the option at fault and its limit."""
    try:
        return kind(**options)
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(kind, e) for e in error.errors())) from None


def changed(config: BaseModel, *names: str) -> str | None:
    """The first of these options that has another value than its default; None if all have that."""
    fields = type(config).model_fields
    return next((name for name in names if getattr(config, name) != fields[name].default), None)


def pick_config(kind: type[ConfigT], options: dict[str, Any]) -> ConfigT:
    """As `make_config`, of those options that are fields of this kind."""
    return make_config(kind, {name: value for name, value in options.items() if name in kind.model_fields})


def load_config_file(path: str) -> dict[str, Any]:
    """The options in a deployment's YAML, as `check_names` takes them. Raises ConfigError."""
    try:
        loaded = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"config file {path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} is not valid YAML: {error}") from None
    options = {} if loaded is None else loaded
    if not isinstance(options, dict):
        raise ConfigError(f"config file {path} must hold a mapping of options, not {type(options).__name__}")
    try:
        return check_names(options)
    except ConfigError as error:
        raise ConfigError(f"config file {path}: {error}") from None


def check_names(options: dict[str, Any]) -> dict[str, Any]:
    """The options of a deployment, if there are such and they belong where they are; values are checked later.

    They are fields of EngineConfig and ServerConfig, and `models`: a list with what each of several models has of its
    own, fields of EngineConfig and ModelServerConfig. Raises ConfigError.
    """
    _check_fields({name: value for name, value in options.items() if name != "models"}, ServerConfig)
    if "models" not in options:
        return options
    models = options["models"]
    if not isinstance(models, list) or not 1 <= len(models) <= MAX_MODELS:
        raise ConfigError(f"models must be a list of 1 to {MAX_MODELS} mappings")
    for field in OWN_FIELDS:
        if field in options:
            raise ConfigError(f"{field} belongs to each of models, not beside them")
    for number, own in enumerate(models):
        if not isinstance(own, dict):
            raise ConfigError(f"models[{number}] must be a mapping of options, not {type(own).__name__}")
        _check_fields(own, ModelServerConfig, f"models[{number}]: ")
    return options


def make_models(options: dict[str, Any], flags: dict[str, Any] | None = None) -> tuple[list[ModelConfig], ServerConfig]:
    """The models of a deployment, and the options of all of it.

    options: as `check_names` returns them. flags: options of all models that are above those. Raises ConfigError, also
    for two models of one name.
    """
    flags, several = flags or {}, "models" in options
    for field in OWN_FIELDS:
        if several and field in flags:
            raise ConfigError(f"{field} cannot be given for several models at once")
    whole = pick_config(ServerConfig, options | flags)
    if whole.ssl_keyfile is not None and whole.ssl_certfile is None:
        raise ConfigError("ssl_keyfile: needs ssl_certfile")
    models = []
    for number, own in enumerate(options.get("models", [{}])):
        merged = options | own | flags
        try:
            engine, server = pick_config(EngineConfig, merged), pick_config(ServerConfig, merged)
            scaling = "target_queued_tokens", "upscale_delay", "downscale_delay"
            if server.max_replicas is None and (idle := changed(server, *scaling)):
                raise ConfigError(f"{idle}: needs max_replicas")
            if server.max_replicas is not None and server.max_replicas < server.num_replicas:
                least = f"num_replicas ({server.num_replicas})"
                raise ConfigError(f"max_replicas: must be at least {least}, not {server.max_replicas}")
        except ConfigError as error:
            raise ConfigError(f"models[{number}]: {error}" if several else str(error)) from None
        models.append(ModelConfig(engine, server))
    names = [name for model in models for name in (model.name, *model.engine.adapters)]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two models have the name {name!r}, adapters included; give them served_model_name")
    return models, whole


def _check_fields(options: dict[str, Any], kind: type[BaseModel], where: str = "") -> None:
    """Raise ConfigError for names that are neither an engine's nor of `kind`. where: begins its message."""
    known = [*EngineConfig.model_fields, *kind.model_fields]
    for name in options:
        if name not in known:
            misplaced = f"{name} belongs to the whole deployment, not to one model"
            raise ConfigError(where + (misplaced if name in ServerConfig.model_fields else _unknown(str(name), known)))


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
