"""What executors need of a rank: `LoadedRank`, a model whose KV cache is not sized yet, and `Rank`, ready to serve.

Between the two all ranks agree on the number of KV blocks. `worker.load_rank` makes the real ones, tests stand-ins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from rayllm.api.types import KVBlocks, RankReady, StepPlan, StepResult
from rayllm.config.resolved import ResolvedConfig
from rayllm.parallel.tp_group import TPGroup


class Rank(Protocol):
    """A rank that serves."""

    @property
    def ready(self) -> RankReady:
        """How its start went."""

    def submit(self, plan: StepPlan) -> None:
        """Start a step; its result comes from `collect`."""

    def collect(self) -> StepResult:
        """The result of the oldest submitted step, once it is on the host. May run on another thread than `submit`."""

    def close(self) -> None:
        """Let go of the device's memory."""


class LoadedRank(Protocol):
    """A rank's part of a model, on its device."""

    def count_blocks(self) -> KVBlocks:
        """KV blocks that this rank has room for."""

    def build(self, blocks: KVBlocks) -> Rank:
        """The rank with its KV cache, warm. To be called on all ranks together, once."""


# (config, this rank's place, its device) -> the rank's model.
LoadRank = Callable[[ResolvedConfig, TPGroup, torch.device], LoadedRank]
