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
FEW_ROWS = 32


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
    """Logits. forward: [N, dim] -> [N, num_tokens], of this rank's tokens, which begin at first_token.

    room: a tensor of N rows or more, where the result is put: calls whose results are not needed at the same time can
    share memory. gather: such parts of all ranks -> [N, vocab_size], on all ranks.
    tied: the embedding whose table is the head's weight too; None gives the head its own. deterministic: a row's
    logits do not depend on the other rows, to the bit.
    """

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        *,
        tied: VocabParallelEmbedding | None,
        tp: TPGroup,
        device: torch.device,
        dtype: torch.dtype,
        deterministic: bool = False,
    ):
        super().__init__()
        self.vocab_size, self.tp, self.is_tied, self.deterministic = vocab_size, tp, tied is not None, deterministic
        self.shard = -(-vocab_size // tp.size)
        self.first_token = tp.rank * self.shard
        self.num_tokens = min(vocab_size - self.first_token, self.shard)
        if vocab_size <= (tp.size - 1) * self.shard:
            raise ValueError(f"a vocabulary of {vocab_size} tokens is too small for {tp.size} ranks")
        self.weight = tied.weight if tied is not None else empty_parameter(self.shard, dim, device=device, dtype=dtype)

    def forward(self, hidden: torch.Tensor, room: torch.Tensor | None = None) -> torch.Tensor:
        weight, rows = self.weight[: self.num_tokens], hidden.shape[0]
        out = None if room is None else room[:rows]
        if self.deterministic:
            logits = ops.linear_invariant(hidden, weight)
            return logits if out is None else out.copy_(logits)
        return ops.linear(hidden, weight, out=out) if rows <= FEW_ROWS else torch.mm(hidden, weight.t(), out=out)

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        if self.tp.size == 1:
            return logits
        padded = F.pad(logits, (0, self.shard - self.num_tokens))  # ranks gather equal parts
        return self.tp.all_gather(padded, dim=-1)[:, : self.vocab_size]

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
