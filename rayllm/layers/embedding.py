"""Token embedding and LM head, split over tensor-parallel ranks by vocabulary.

The vocabulary is padded to a multiple of the number of ranks; padding rows are zero, and no id and no logit ever
refers to them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from rayllm.layers.weights import WeightSource, empty_parameter
from rayllm.parallel.tp_group import TPGroup
from rayllm_kernels import ops

# Up to so many rows our own product is mostly faster for weights as wide as a vocabulary (benchmarks/RESULTS.md).
MAX_OWN_ROWS = 32


class VocabParallelEmbedding(nn.Module):
    """Rank r holds rows [r * shard, (r + 1) * shard) of the padded table. forward: ids [T] -> [T, dim] on all ranks."""

    def __init__(self, vocab_size: int, dim: int, *, tp: TPGroup, device: torch.device, dtype: torch.dtype):
        super().__init__()
        self.vocab_size, self.dim, self.tp = vocab_size, dim, tp
        self.shard = -(-vocab_size // tp.size)
        self.weight = empty_parameter(self.shard, dim, device=device, dtype=dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.tp.size == 1:
            return F.embedding(ids, self.weight)
        rows = ids - self.tp.rank * self.shard
        elsewhere = (rows < 0) | (rows >= self.shard)
        found = F.embedding(rows.masked_fill(elsewhere, 0), self.weight)
        return self.tp.all_reduce(found.masked_fill_(elsewhere[:, None], 0.0))

    def load(self, source: WeightSource, prefix: str) -> None:
        """Read the rank's rows of `prefix` + ".weight"."""
        load_vocab_rows(self.weight, source, prefix + ".weight", self.vocab_size, self.tp.rank * self.shard)


class ParallelLMHead(nn.Module):
    """Logits of every token in the vocabulary. forward: [N, dim] -> [N, vocab_size], the same on all ranks.

    tied: the embedding whose table is the head's weight too; None gives the head its own. deterministic: a row's
    logits do not depend on the other rows, to the bit.
    """

    def __init__(
        self, vocab_size: int, dim: int, *, tied: VocabParallelEmbedding | None,
        tp: TPGroup, device: torch.device, dtype: torch.dtype, deterministic: bool = False,
    ):  # fmt: skip
        super().__init__()
        self.vocab_size, self.tp, self.is_tied, self.deterministic = vocab_size, tp, tied is not None, deterministic
        self.shard = -(-vocab_size // tp.size)
        self.weight = tied.weight if tied is not None else empty_parameter(self.shard, dim, device=device, dtype=dtype)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.deterministic:
            logits = ops.linear_invariant(hidden, self.weight)
        elif hidden.shape[0] <= MAX_OWN_ROWS:
            logits = ops.linear(hidden, self.weight)
        else:
            logits = F.linear(hidden, self.weight)
        return self.tp.all_gather(logits, dim=-1)[:, : self.vocab_size]

    def load(self, source: WeightSource, prefix: str) -> None:
        """Read the rank's rows of `prefix` + ".weight", unless the embedding has them."""
        if self.is_tied:
            source.skip(prefix + ".weight")
        else:
            load_vocab_rows(self.weight, source, prefix + ".weight", self.vocab_size, self.tp.rank * self.shard)


def load_vocab_rows(weight: nn.Parameter, source: WeightSource, name: str, vocab_size: int, start: int) -> None:
    """Fill `weight` [shard, dim] with the rows of `name` from `start` on, and with zeros past the vocabulary."""
    shard, dim = weight.shape
    present = min(max(vocab_size - start, 0), shard)
    if present:
        source.write(weight[:present], source.slice(name, (vocab_size, dim), 0, start, start + present))
    if present < shard:
        source.write(weight[present:], weight.new_zeros(()))
