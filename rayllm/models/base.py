"""`CausalLM`: what a worker may ask of any model."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import nn

from rayllm.config.model_spec import ModelSpec
from rayllm.layers.attention import KVCache
from rayllm.layers.batch import ForwardBatch
from rayllm.layers.embedding import ParallelLMHead
from rayllm.layers.weights import WeightSource
from rayllm.parallel.tp_group import TPGroup
from rayllm_kernels.ops import KVScales


class CausalLM(nn.Module, ABC):
    """One rank's part of a model. Called under torch.inference_mode, by all ranks of `tp` with the same arguments.

    deterministic: a token's hidden state and logits depend on the tokens up to it alone, to the bit: not on what else
    is in the batch, nor on how they came in. Captured batches must then hold decodes as chunks.
    lm_head: which part of the vocabulary is this rank's. num_layers: length of the list of KV caches.
    num_kv_heads_per_rank, head_dim: a cache is two tensors [num_blocks, num_kv_heads_per_rank, block_size, head_dim].
    kv_scales: of each layer, for a cache in fp8: those of the checkpoint, None where it has none.
    """

    lm_head: ParallelLMHead

    def __init__(self, spec: ModelSpec, tp: TPGroup, deterministic: bool):
        super().__init__()
        self.spec = spec
        self.tp = tp
        self.deterministic = deterministic
        self.num_layers = spec.num_layers
        self.num_kv_heads_per_rank = spec.kv_heads_per_rank(tp.size)
        self.head_dim = spec.head_dim
        self.kv_scales: list[KVScales | None] = [None] * spec.num_layers

    @abstractmethod
    def forward(self, batch: ForwardBatch, kv_caches: list[KVCache]) -> torch.Tensor:
        """Hidden states of batch.logit_rows after the final norm, [N, hidden_size]; writes all tokens' KV.

        kv_caches: one a layer, or those of the first layers: then the others are left out, which is of use where only
        the kernels that run matter. A batch of decodes only reads no tensor on the host and can be captured in a CUDA
        graph.
        """

    @abstractmethod
    def local_logits(self, hidden: torch.Tensor, room: torch.Tensor | None = None) -> torch.Tensor:
        """[N, hidden_size] -> logits of this rank's tokens, [N, lm_head.num_tokens] in the model's dtype.

        room: as for `ParallelLMHead`.
        """

    def gather_logits(self, local: torch.Tensor) -> torch.Tensor:
        """All ranks' `local_logits` [N, ...] -> [N, vocab_size], the same on all ranks."""
        return self.lm_head.gather(local)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, hidden_size] -> logits [N, vocab_size] in the model's dtype, the same on all ranks."""
        return self.gather_logits(self.local_logits(hidden))

    @abstractmethod
    def load(self, source: WeightSource) -> None:
        """Fill every parameter with this rank's slices."""


def name_prefix(source: WeightSource, probe: str, body: str = "model.") -> str:
    """What precedes the names of the weights: `body` as saved from the whole model, "" as saved from its body alone.

    probe: a name that every checkpoint of this model has, without the prefix.
    """
    return "" if source.has(probe) and not source.has(body + probe) else body
