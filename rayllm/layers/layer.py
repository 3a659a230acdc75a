"""`Layer`: a part of a model that has weights, and `BuildContext`: what every layer of a rank's model is made with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch
from torch import nn

from rayllm.config.quantization import WeightFormat
from rayllm.layers.lora import AdapterState
from rayllm.layers.weights import WeightSource
from rayllm.parallel.shared_weights import SharedWeights
from rayllm.parallel.tp_group import TPGroup


@dataclass(frozen=True)
class BuildContext:
    """One rank's place, and how its layers are to be: a model is handed one and makes its layers with it.

    Sizes are of the whole model. Each layer keeps the rank's part of its weights, and reads it by itself.

    max_model_len: tokens of a sequence at most; no position reaches it.
    expert_parallel: ranks share experts as wholes, not each expert's width.
    deterministic: a token's result does not depend on the other tokens of a call, to the bit.
    prefix: what the names of weights in the checkpoint begin with: empty, or it ends with a dot.
    memory: of the parameters; None for memory of their own.
    adapters: of the projections; None for none.
    formats: module of the checkpoint -> in how many bits its weight is to stay; None for all in dtype.
    """

    tp: TPGroup
    device: torch.device
    dtype: torch.dtype
    max_model_len: int
    deterministic: bool = False
    prefix: str = ""
    memory: SharedWeights | None = None
    adapters: AdapterState | None = None
    formats: Callable[[str], WeightFormat | None] | None = None
    expert_parallel: bool = False

    def at(self, name: str) -> Self:
        """The same for the part `name` of what this is for."""
        return replace(self, prefix=f"{self.prefix}{name}.")

    @property
    def replicated(self) -> Self:
        """For layers that every rank has whole."""
        return replace(self, tp=TPGroup.single())

    @property
    def unquantised(self) -> Self:
        """For layers that have their weights in dtype, whatever the checkpoint has."""
        return replace(self, formats=None)

    def format_of(self, module: str) -> WeightFormat | None:
        """How a linear layer is to keep the weight of a module of the checkpoint; None for in dtype."""
        return None if self.formats is None else self.formats(module)

    def parameter(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """One to be filled by `WeightSource.write`, unless its memory is; its contents are undefined until then.

        dtype: None for the model's.
        """
        dtype = dtype or self.dtype
        if self.memory is not None:
            return nn.Parameter(self.memory.take(shape, dtype), requires_grad=False)
        return nn.Parameter(torch.empty(shape, device=self.device, dtype=dtype), requires_grad=False)

    def shard(self, size: int, what: str) -> int:
        """A rank's share of `size`. Raises ValueError if the ranks cannot share it evenly."""
        if size % self.tp.size:
            raise ValueError(f"{what} must be a multiple of {self.tp.size} ranks, not {size}")
        return size // self.tp.size


class Heads(NamedTuple):
    """Attention heads of the whole model. Ranks share them evenly; where there are more ranks than KV heads, tp /
    num_kv_heads neighbouring ranks have the same one.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int


class Layer(nn.Module):
    """One that reads its weights by itself. prefix: of their names in the checkpoint."""

    def __init__(self, context: BuildContext):
        super().__init__()
        self.tp, self.prefix = context.tp, context.prefix

    def load(self, source: WeightSource) -> None:
        """Fill the layer's own parameters: here with the whole tensors of their names."""
        for name, parameter in self.named_parameters(recurse=False):
            source.write(parameter, source.tensor(self.prefix + name, tuple(parameter.shape)))
