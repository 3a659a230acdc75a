"""`CausalLM`: what a worker may ask of any model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from rayllm.config.model_spec import ModelSpec
from rayllm.layers.attention import Attention, LayerCache
from rayllm.layers.batch import ForwardBatch
from rayllm.layers.embedding import LMHead
from rayllm.layers.experts import Experts
from rayllm.layers.gated_delta import LayerState
from rayllm.layers.layer import BuildContext, Heads, Layer
from rayllm.layers.linear import Linear
from rayllm.layers.lora import ProjectionAdapters
from rayllm.layers.weights import WeightSource
from rayllm_kernels.ops import KVScales

# What a layer keeps of the sequences.
Cache = LayerCache | LayerState


class CausalLM(nn.Module, ABC):
    """One rank's part of a model. Called under torch.inference_mode, by all ranks of `tp` with the same arguments.

    What a mode promises of results, the layers keep that the context is handed to; a model branches on none.
    lm_head: which part of the vocabulary is this rank's. There is a KV cache for each of spec.num_layers: two tensors
    [num_blocks, heads, block_size, head_dim], whose heads and head_dim are spec.kv_shape of the layer; layers with a
    recurrent state have a `LayerState` instead.
    """

    lm_head: LMHead

    def __init__(self, build: BuildContext, spec: ModelSpec):
        super().__init__()
        self.build, self.spec, self.tp = build, spec, build.tp
        if (adapters := build.adapters) is not None:
            self.register_forward_pre_hook(
                lambda _model, args: adapters.begin(args[0].adapter_slots, args[0].logit_rows)
            )
        self.num_kv_heads_per_rank = spec.kv_heads_per_rank(build.tp.size)

    @property
    def kv_scales(self) -> list[KVScales | None]:
        """Of each layer, for a cache in fp8: those of the checkpoint, None where it has none."""
        return [module.scales for module in self.modules() if isinstance(module, Attention)]

    @property
    def projection_adapters(self) -> list[ProjectionAdapters]:
        """Of all projections that have slots for adapters."""
        modules = [module for module in self.modules() if isinstance(module, Linear)]
        return [module.adapters for module in modules if module.adapters is not None]

    @property
    def active_parameters(self) -> int:
        """Numbers of the rank that a token is computed with, of however many bits; scales and zero points are none.

        Of experts it is the share that a token goes through on average.
        """
        total = _num_elements(self.parameters())
        for module in self.modules():
            if isinstance(module, Linear):
                total += module.num_weights - _num_elements(module.matrix.parameters.values())
            elif isinstance(module, Experts) and (sizes := self.spec.experts) is not None:
                active = module.num_parameters * sizes.top_k // sizes.num_experts
                total += active - _num_elements(module.parameters())
        return total

    @abstractmethod
    def forward(self, batch: ForwardBatch, kv_caches: list[Any]) -> torch.Tensor:
        """Hidden states of batch.logit_rows after the final norm, [N, hidden_size]; writes all tokens' KV.

        kv_caches: a `Cache` a layer, or those of the first layers: then the others are left out, which is of use where
        only the kernels that run matter. A batch of decodes only reads no tensor on the host and can be captured in a
        CUDA graph.
        """

    def local_logits(self, hidden: torch.Tensor, room: torch.Tensor | None = None) -> torch.Tensor:
        """[N, hidden_size] -> logits of this rank's tokens, [N, lm_head.num_tokens] in the model's dtype.

        room: as for `LMHead`.
        """
        return self.lm_head(hidden, room)

    def gather_logits(self, local: torch.Tensor) -> torch.Tensor:
        """All ranks' `local_logits` [N, ...] -> [N, vocab_size], the same on all ranks."""
        return self.lm_head.gather(local)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, hidden_size] -> logits [N, vocab_size] in the model's dtype, the same on all ranks."""
        return self.gather_logits(self.local_logits(hidden))

    def load(self, source: WeightSource) -> None:
        """Fill every parameter with this rank's slices."""
        for module in self.modules():
            if isinstance(module, Layer):
                module.load(source)


def _num_elements(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def heads_of(spec: ModelSpec, layer: int = 0) -> Heads:
    """Of the whole model, for one of its layers."""
    return Heads(spec.num_heads, *spec.kv_heads(layer))
