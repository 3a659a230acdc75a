"""RMS norms of whole query and key projections, each over all heads at once, as MiniMax-M2 has them."""

from __future__ import annotations

import torch

from rayllm.layers.layer import BuildContext, Heads, Layer
from rayllm.layers.linear import qkv_parts
from rayllm.layers.weights import WeightSource
from rayllm_kernels import ops


class ProjectionNorms(Layer):
    """forward: [T, (heads + 2 KV heads) * head_dim] of the rank -> the same with queries and with keys normed.

    Ranks add up the squares of their heads, so that all divide by the root mean square of the whole projection. Where
    several ranks have the same KV head, it is counted as often, and so are the entries that the mean is of.
    """

    def __init__(self, context: BuildContext, heads: Heads, eps: float):
        super().__init__(context)
        self.eps, self.deterministic = eps, context.deterministic
        self.query, self.key, self.value = qkv_parts(context, heads)
        self.q_norm = context.parameter(self.query.rows)
        self.k_norm = context.parameter(self.key.rows)

    def forward(self, qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = qkv.split([self.query.rows, self.key.rows, self.value.rows], dim=1)
        if self.tp.size == 1:
            return torch.cat([ops.rms_norm(q, self.q_norm, self.eps), ops.rms_norm(k, self.k_norm, self.eps), v], dim=1)
        wide = q.float(), k.float()
        squares = self.tp.all_reduce(torch.cat([self._squares(part) for part in wide], dim=1))
        parts = zip(wide, squares.split(1, dim=1), (self.q_norm, self.k_norm), strict=True)
        normed = [
            weight * (part * torch.rsqrt(total / (part.shape[1] * self.tp.size) + self.eps)).to(qkv.dtype)
            for part, total, weight in parts
        ]
        return torch.cat([*normed, v], dim=1)

    def _squares(self, part: torch.Tensor) -> torch.Tensor:
        """[T, 1], the sum of each row's."""
        if self.deterministic:  # the order of PyTorch's sum on CUDA depends on the number of rows
            return ops.linear_invariant(part.pow(2), part.new_ones(1, part.shape[1]))
        return part.pow(2).sum(-1, keepdim=True)

    def load(self, source: WeightSource) -> None:
        for name, parameter, part in (("q_norm", self.q_norm, self.query), ("k_norm", self.k_norm, self.key)):
            stored = source.slice(f"{self.prefix}{name}.weight", (part.total,), 0, part.start, part.start + part.rows)
            source.write(parameter, stored)
