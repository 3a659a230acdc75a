"""Token embedding and LM head, split over tensor-parallel ranks by vocabulary.

The vocabulary is padded to a multiple of the number of ranks; padding rows are zero, and no id and no logit ever
refers to them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from rayllm.errors import ModelError
from rayllm.layers.activation import soft_cap
from rayllm.layers.layer import BuildContext, Layer
from rayllm.layers.weights import WeightSource
from rayllm_kernels import ops

# Up to so many rows our own product is mostly faster for weights as wide as a vocabulary (benchmarks/RESULTS.md).
FEW_ROWS = 32


class VocabLayer(Layer):
    """A table [vocab_size, dim], of which rank r holds rows [r * shard, (r + 1) * shard), padded.

    weight: [shard, dim], of another layer or, if None, the layer's own. first_token, num_tokens: which tokens the rank
    has.
    """

    def __init__(self, context: BuildContext, vocab_size: int, dim: int, weight: nn.Parameter | None = None):
        super().__init__(context)
        self.other_names: tuple[str, ...] = ()  # that the weight may have in a checkpoint
        self.vocab_size, self.shard = vocab_size, -(-vocab_size // context.tp.size)
        self.first_token = context.tp.rank * self.shard
        self.num_tokens = min(max(vocab_size - self.first_token, 0), self.shard)
        self.weight = context.parameter(self.shard, dim) if weight is None else weight

    def load(self, source: WeightSource) -> None:
        first, rows, (shard, dim) = self.first_token, self.num_tokens, self.weight.shape
        if rows:
            name = source.choose(self.prefix + "weight", *self.other_names)
            stored = source.slice(name, (self.vocab_size, dim), 0, first, first + rows)
            source.write(self.weight[:rows], stored)
        if rows < shard:
            source.write(self.weight[rows:], self.weight.new_zeros(()))


class Embedding(VocabLayer):
    """forward: ids [T] -> [T, dim], on all ranks.

    scale: what the embeddings are multiplied by, once it is rounded to the model's dtype; None for nothing.
    """

    def __init__(self, context: BuildContext, vocab_size: int, dim: int, *, scale: float | None = None):
        super().__init__(context, vocab_size, dim)
        self.scale = None if scale is None else float(torch.tensor(scale, dtype=context.dtype))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found = self._find(ids)
        return found if self.scale is None else found * self.scale

    def _find(self, ids: torch.Tensor) -> torch.Tensor:
        if self.tp.size == 1:
            return F.embedding(ids, self.weight)
        rows = ids - self.first_token
        elsewhere = (rows < 0) | (rows >= self.shard)
        found = F.embedding(rows.masked_fill(elsewhere, 0), self.weight)
        return self.tp.all_reduce(found.masked_fill_(elsewhere[:, None], 0.0))


class LMHead(VocabLayer):
    """Logits. forward: [N, dim] -> [N, num_tokens], of this rank's tokens, which begin at first_token.

    room: a tensor of N rows or more, where the result is put: calls whose results are not needed at the same time can
    share memory. gather: such parts of all ranks -> [N, vocab_size], on all ranks.
    tied: the embedding whose table is the head's weight too; None gives the head its own.
    softcap: logits become softcap * tanh(logits / softcap); None leaves them alone.
    """

    def __init__(
        self, context: BuildContext, vocab_size: int, dim: int, *, tied: Embedding | None, softcap: float | None = None
    ):
        super().__init__(context, vocab_size, dim, None if tied is None else tied.weight)
        self.capped = None if softcap is None else soft_cap(softcap, context)
        self.is_tied, self.deterministic = tied is not None, context.deterministic
        if tied is not None:  # some tools drop the first of two equal tensors, and some the second
            tied.other_names = (self.prefix + "weight",)
        if vocab_size <= (context.tp.size - 1) * self.shard:
            raise ValueError(f"a vocabulary of {vocab_size} tokens is too small for {context.tp.size} ranks")

    def forward(self, hidden: torch.Tensor, room: torch.Tensor | None = None) -> torch.Tensor:
        weight, rows = self.weight[: self.num_tokens], hidden.shape[0]
        out = None if room is None else room[:rows]
        if self.deterministic:
            logits = ops.linear_invariant(hidden, weight)
            if self.capped is not None:
                logits = self.capped(logits)
            return logits if out is None else out.copy_(logits)
        logits = ops.linear(hidden, weight, out=out) if rows <= FEW_ROWS else torch.mm(hidden, weight.t(), out=out)
        return logits if self.capped is None else self.capped(logits)

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        if self.tp.size == 1:
            return logits
        padded = F.pad(logits, (0, self.shard - self.num_tokens))  # ranks gather equal parts
        return self.tp.all_gather(padded)[:, : self.vocab_size]

    def load(self, source: WeightSource) -> None:
        if self.is_tied:  # checkpoints may have it all the same
            own, rows = source.optional(self.prefix + "weight"), self.weight[: self.num_tokens]
            stored = None if own is None else own[self.first_token : self.first_token + self.num_tokens].to(rows)
            if stored is not None and not torch.equal(stored, rows):
                name = self.prefix + "weight"
                raise ModelError(f"weight {name} is not the embedding, though config.json says tie_word_embeddings")
        else:
            super().load(source)
