"""Engines from options: what is decided before anything starts, the executor, and the core over it."""

from __future__ import annotations

from rayllm.config.options import EngineConfig
from rayllm.config.resolved import ResolvedConfig, resolve, uses_ray
from rayllm.engine.engine import EngineCore, build_engine_core
from rayllm.executor.base import Executor


def start_engine(options: EngineConfig) -> EngineCore:
    """An engine on this machine, or on the Ray cluster that this process is in, or that is started for it.

    Blocks while the model loads. Raises ConfigError, ModelError or StartupError.
    """
    if not uses_ray(options):
        import torch

        return start_resolved_engine(resolve(options, torch.cuda.device_count()))
    import ray

    from rayllm.executor.ray_cluster import connect_to_ray

    owns_ray = connect_to_ray()
    try:
        return start_resolved_engine(resolve(options, ray.cluster_resources().get("GPU", 0)), owns_ray=owns_ray)
    except BaseException:
        if owns_ray:
            ray.shutdown()
        raise


def start_resolved_engine(config: ResolvedConfig, *, owns_ray: bool = False) -> EngineCore:
    """An engine with these settled options. owns_ray: Ray was started for it, and ends with it.

    Blocks while the model loads. Raises ConfigError, ModelError or StartupError.
    """
    executor: Executor
    if config.executor == "ray":
        from rayllm.executor.ray import RayExecutor

        executor = RayExecutor(config, owns_ray=owns_ray)
    else:
        from rayllm.executor.local import LocalExecutor

        executor = LocalExecutor(config)
    return build_engine_core(config, executor)
