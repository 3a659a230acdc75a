"""Engines from options: what is decided before anything starts, the executor, and the core over it."""

from __future__ import annotations

import gc
import logging
import time
from contextlib import ExitStack

from rayllm.config.options import EngineConfig
from rayllm.config.quantization import FP8_BY_CHANNEL
from rayllm.config.resolved import ResolvedConfig, resolve, uses_ray
from rayllm.engine.engine import EngineCore
from rayllm.executor.base import Executor
from rayllm.text.grammar_compiler import GrammarCompiler

logger = logging.getLogger(__name__)


def start_engine(options: EngineConfig) -> EngineCore:
    """An engine on this machine, or on the Ray cluster that this process is in, or that is started for it.

    Blocks while the model loads. Raises ConfigError, ModelError or StartupError.
    """
    if not uses_ray(options):
        import torch

        return start_resolved_engine(resolve(options, torch.cuda.device_count()))
    import ray

    from rayllm.executor.checkpoints import offered_checkpoint
    from rayllm.executor.ray_cluster import connect_to_ray

    owns_ray = connect_to_ray()
    try:
        config = resolve(options, ray.cluster_resources().get("GPU", 0))
        with ExitStack() as life:
            if sum(node["Alive"] for node in ray.nodes()) > 1:
                life.enter_context(offered_checkpoint(config.options.model))
            return start_resolved_engine(config, _make_executor(config, owns_ray))
    except BaseException:
        if owns_ray:
            ray.shutdown()
        raise


def start_resolved_engine(config: ResolvedConfig, executor: Executor | None = None) -> EngineCore:
    """An engine with these settled options.

    executor: not started yet; None makes the one that the options ask for. Blocks while the model loads. Raises
    ConfigError or ModelError for what cannot work as configured, StartupError if the workers don't come up.
    """
    started = time.monotonic()
    executor = executor or _make_executor(config)
    # Full passes of the garbage collector visit libraries too, for 100 to 200 ms, if these are not left out: first from
    # the passes of the start, then, with what that has made, from all later ones.
    gc.freeze()
    grammars = None
    if not config.options.skip_tokenizer_init:
        grammars = GrammarCompiler(config.options.model, config.spec.vocab_size, config.spec.eos_token_ids)
    try:
        core = EngineCore(config, executor, executor.start(), grammars)
    except BaseException:
        if grammars is not None:
            grammars.close()
        executor.shutdown()
        raise
    gc.collect()
    gc.freeze()
    spec = config.spec
    if (about := _about_quantised(config)) is not None:
        logger.info("%s", about)
    if spec.rope is not None and spec.default_model_len < spec.max_model_len:
        logger.info(
            "positions of rope_type %s are exact up to %d tokens; max_model_len is %d, and may be up to %d",
            spec.rope.rope_type,
            spec.default_model_len,
            config.max_model_len,
            spec.max_model_len,
        )
    taken, info = time.monotonic() - started, core.info
    logger.info(
        "engine ready in %.1f s, %d KV tokens, %d sequences at once, sampling defaults %s",
        taken,
        info.num_kv_tokens,
        info.max_num_seqs,
        info.sampling_defaults,
    )
    return core


def _about_quantised(config: ResolvedConfig) -> str | None:
    """One line that says in which bits weights are stored and computed with; None if all are in dtype."""
    quantization, dtype, choice = config.spec.quantization, config.dtype, config.options.quantization
    if quantization is None:
        return f"linear layers are rounded to {FP8_BY_CHANNEL} from {dtype}" if choice == "fp8" else None
    stored = f"weights are stored in {quantization}"
    if choice == "none":
        if config.options.load_format == "dummy":
            return f"{stored}; dummy weights are made in {dtype}"
        return f"{stored} and dequantised to {dtype} while they load: they take as much memory as {dtype} ones"
    return f"{stored}; linear layers keep them where there are products for it, all others have them in {dtype}"


def _make_executor(config: ResolvedConfig, owns_ray: bool = False) -> Executor:
    """owns_ray: Ray was started for this engine, and ends with it."""
    if config.executor == "ray":
        from rayllm.executor.ray import RayExecutor

        return RayExecutor(config, owns_ray=owns_ray)
    from rayllm.executor.local import LocalExecutor

    return LocalExecutor(config)
