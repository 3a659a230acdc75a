"""Where the workers run. `make_executor` picks the implementation; each is imported only when it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rayllm.config.options import EngineConfig
from rayllm.errors import ConfigError
from rayllm.executor.base import Executor, WorkerLimits

if TYPE_CHECKING:
    from rayllm.config.model_spec import ModelSpec

__all__ = ["Executor", "WorkerLimits", "make_executor"]


def make_executor(config: EngineConfig, spec: ModelSpec) -> Executor:
    """The executor that `config` asks for, not yet started: "auto" is local for one rank, else ray.

    Raises ConfigError for executor "local" with more than one rank.
    """
    ranks = config.tensor_parallel_size
    if config.executor == "local" and ranks > 1:
        raise ConfigError(
            f'executor "local" runs one rank, but tensor_parallel_size is {ranks}: use executor "ray" or "auto"'
        )
    if config.executor == "ray" or ranks > 1:
        from rayllm.executor.ray import RayExecutor

        return RayExecutor(config, spec)
    from rayllm.executor.local import LocalExecutor

    return LocalExecutor(config, spec)
