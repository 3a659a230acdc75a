"""`ResolvedConfig`: what an engine's options come to on this machine or cluster, decided once before anything starts.

Whoever runs a part of an engine (driver, executor, workers, models) is handed this object and decides nothing again.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rayllm.config.kv_groups import block_tokens
from rayllm.config.model_folder import load_model_spec, load_sampling_defaults
from rayllm.config.model_spec import ModelSpec, check_parallel
from rayllm.config.options import EngineConfig, changed
from rayllm.errors import ConfigError

# Where max_num_seqs is not given. A CPU gains little by more, and a step takes as much longer as it has more sequences.
NUM_SEQS = {"cpu": (32,), "cuda": (256, 512, 1024)}
# Where max_num_batched_tokens is not given. So many tokens of a small model take two CPU cores a tenth of a second.
BATCHED_TOKENS = {"cpu": 128, "cuda": 8192}
MAX_GPUS = 8  # that an engine may ask for
ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """An engine's options, checked against the model and the hardware."""

    # As the user gave them; `model` is an absolute path.
    options: EngineConfig
    # The model's shape.
    spec: ModelSpec
    # Where ranks compute.
    device: Literal["cpu", "cuda"]
    # Where ranks run: in the driver's process, or as Ray actors.
    executor: Literal["local", "ray"]
    # Each rank has a standby.
    standbys: bool
    # Of weights and activations, as PyTorch names it.
    dtype: str
    # Of the KV cache, as PyTorch names it.
    kv_dtype: str
    # Tokens of a prompt and its output together; the KV cache may turn out to hold fewer.
    max_model_len: int
    # Sequences that may run at once, ascending; ranks take the most for which they have the memory.
    num_seqs_choices: tuple[int, ...]
    # That one step computes at most.
    max_num_batched_tokens: int
    # Fields of `SamplingParams` that requests have where they say nothing else.
    sampling_defaults: dict[str, Any]

    @property
    def tp(self) -> int:
        """Tensor-parallel ranks."""
        return self.options.tensor_parallel_size

    @property
    def block_size(self) -> int:
        """Tokens of a block of the KV cache."""
        sizes = {"dtype_bytes": ITEMSIZES[self.dtype], "kv_bytes": ITEMSIZES[self.kv_dtype]}
        return block_tokens(self.spec, self.tp, self.options.block_size, **sizes)


def uses_ray(options: EngineConfig) -> bool:
    """Whether the engine's ranks are Ray actors."""
    return options.executor == "ray" or options.tensor_parallel_size > 1


def resolve(options: EngineConfig, num_gpus: float) -> ResolvedConfig:
    """Decide what `options` leave open, and check them against the model's config.json.

    num_gpus: in the cluster if the ranks are Ray actors, in this process else. Raises ConfigError or ModelError.
    """
    spec, tp = load_model_spec(options.model), options.tensor_parallel_size
    check_parallel(spec, tp, expert_parallel=options.enable_expert_parallel)
    if options.executor == "local" and tp > 1:
        raise ConfigError(f'executor "local" runs one rank, but tensor_parallel_size is {tp}: use "ray" or "auto"')
    if options.preemption_mode == "swap" and not options.swap_space:
        raise ConfigError('preemption_mode: must be "cost" or "recompute" if swap_space is 0, not "swap"')
    if options.max_model_len is not None and options.max_model_len > spec.max_model_len:
        raise ConfigError(f"max_model_len {options.max_model_len} exceeds the model's limit of {spec.max_model_len}")
    if not options.enable_lora and (
        idle := changed(options, "lora_modules", "max_loras", "max_lora_rank", "max_cpu_loras")
    ):
        raise ConfigError(f"{idle} needs enable_lora")
    if len(options.lora_modules) > options.max_cpu_loras:
        raise ConfigError(
            f"lora_modules has {len(options.lora_modules)} adapters, and max_cpu_loras is {options.max_cpu_loras}"
        )
    if options.quantization == "fp8" and spec.quantization is not None and not spec.quantization.is_fp8:
        raise ConfigError(
            f'quantization "fp8" is for weights in 16 bits or more; the checkpoint\'s are in {spec.quantization} '
            '(quantization "auto" serves it)'
        )
    device: Literal["cpu", "cuda"] = "cpu" if options.device == "cpu" or num_gpus < 1 else "cuda"
    if options.device == "cuda" and device == "cpu":
        raise ConfigError('device "cuda" needs a GPU, and there is none (device "cpu" works)')
    if device == "cuda" and num_gpus < tp:
        raise ConfigError(f"tensor_parallel_size {tp} on device cuda needs {tp} GPUs; there are {num_gpus:g}")
    dtype: str = options.dtype
    if dtype == "auto":
        # CPUs compute faster in float32; float32 checkpoints do not gain by it on GPUs.
        dtype = "float32" if device == "cpu" else "bfloat16" if spec.dtype == "float32" else spec.dtype
    return ResolvedConfig(
        options=options.model_copy(update={"model": str(Path(options.model).resolve())}),
        spec=spec,
        device=device,
        executor="ray" if uses_ray(options) else "local",
        standbys=uses_ray(options) and options.standby_ranks == "auto",
        dtype=dtype,
        kv_dtype=_kv_dtype(options, spec, dtype),
        max_model_len=options.max_model_len or spec.default_model_len,
        num_seqs_choices=(options.max_num_seqs,) if options.max_num_seqs else NUM_SEQS[device],
        max_num_batched_tokens=options.max_num_batched_tokens or BATCHED_TOKENS[device],
        sampling_defaults={} if options.generation_config == "none" else load_sampling_defaults(options.model),
    )


def _kv_dtype(options: EngineConfig, spec: ModelSpec, dtype: str) -> str:
    if options.kv_cache_dtype == "auto":
        return dtype
    if spec.latent is not None:
        raise ConfigError(
            f"kv_cache_dtype {options.kv_cache_dtype} is not supported for latent attention, which {spec.architecture} "
            'has; supported is "auto"'
        )
    if spec.gated_delta is not None:
        raise ConfigError(
            f'kv_cache_dtype must be "auto" for {spec.architecture}, which keeps a recurrent state, '
            f"not {options.kv_cache_dtype}"
        )
    if spec.head_dim % 2:
        raise ConfigError(
            f"kv_cache_dtype {options.kv_cache_dtype} needs an even head_dim; the model's is {spec.head_dim}"
        )
    return "float8_e5m2" if options.kv_cache_dtype == "fp8_e5m2" else "float8_e4m3fn"
