"""Linear layers split over tensor-parallel ranks: columns (outputs) or rows (inputs) of the weight.

Column-parallel layers leave each rank its own part of the output; a row-parallel layer takes such parts in and sums its
partial products over the ranks (Shoeybi et al., 2019). Weights are [out, in], as in `torch.nn.Linear`.

deterministic, of every layer: a token's output does not depend on the other tokens of a call, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from rayllm.layers.norm import RMSNorm
from rayllm.layers.weights import WeightSource, empty_parameter
from rayllm.parallel.tp_group import TPGroup
from rayllm_kernels import ops

ADD_TOKENS = 1024  # from here on a norm is bound by memory, not by its launch


def linear_op(deterministic: bool) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]:
    """(x, weight, bias) -> x W^T + bias."""
    return ops.linear_invariant if deterministic else ops.linear


def shard_size(size: int, tp: TPGroup, what: str) -> int:
    """size / tp.size. Raises ValueError if that is no integer."""
    if size % tp.size:
        raise ValueError(f"{what} must be a multiple of {tp.size} ranks, not {size}")
    return size // tp.size


class MergedColumnParallelLinear(nn.Module):
    """Several column-parallel layers of one input as one matrix product.

    parts: name in the checkpoint -> output features of the whole layer. forward: [T, in] -> [T, sum(parts) / tp], the
    rank's shards of the parts side by side.
    """

    def __init__(
        self,
        in_features: int,
        parts: dict[str, int],
        *,
        bias: bool,
        tp: TPGroup,
        device: torch.device,
        dtype: torch.dtype,
        deterministic: bool = False,
    ):
        super().__init__()
        self.in_features, self.parts, self.tp, self.linear = in_features, parts, tp, linear_op(deterministic)
        self.shard_sizes = [shard_size(size, tp, name) for name, size in parts.items()]
        out = sum(self.shard_sizes)
        self.weight = empty_parameter(out, in_features, device=device, dtype=dtype)
        self.bias = empty_parameter(out, device=device, dtype=dtype) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x, self.weight, self.bias)

    def load(self, source: WeightSource, prefix: str) -> None:
        """Read `prefix` + part + ".weight" (and ".bias") of every part."""
        offset = 0
        for (name, size), shard in zip(self.parts.items(), self.shard_sizes, strict=True):
            start = self.tp.rank * shard
            _load_rows(self.weight, self.bias, offset, source, prefix + name, (size, self.in_features), start, shard)
            offset += shard


class ColumnParallelLinear(MergedColumnParallelLinear):
    """One layer split by outputs: [T, in] -> [T, out / tp]. With `TPGroup.single()` it is a replicated layer."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        tp: TPGroup,
        device: torch.device,
        dtype: torch.dtype,
        deterministic: bool = False,
    ):
        super().__init__(
            in_features, {"": out_features}, bias=bias, tp=tp, device=device, dtype=dtype, deterministic=deterministic
        )


class QKVParallelLinear(nn.Module):
    """Query, key and value projections as one matrix product, split by heads.

    Each rank has num_heads / tp query heads and the KV heads that they use: num_kv_heads / tp of them, or one, held
    by tp / num_kv_heads neighbouring ranks, where there are more ranks than KV heads.
    forward: [T, hidden] -> q [T, heads, head_dim], k and v [T, kv heads, head_dim], views of one tensor.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        bias: bool,
        tp: TPGroup,
        device: torch.device,
        dtype: torch.dtype,
        deterministic: bool = False,
    ):
        super().__init__()
        if num_kv_heads % tp.size and tp.size % num_kv_heads:
            raise ValueError(f"{num_kv_heads} KV heads cannot be shared by {tp.size} ranks")
        self.hidden_size, self.total_heads, self.total_kv_heads = hidden_size, num_heads, num_kv_heads
        self.head_dim, self.tp, self.deterministic = head_dim, tp, deterministic
        self.num_heads = shard_size(num_heads, tp, "num_heads")
        self.num_kv_heads = max(1, num_kv_heads // tp.size)
        out = (self.num_heads + 2 * self.num_kv_heads) * head_dim
        self.weight = empty_parameter(out, hidden_size, device=device, dtype=dtype)
        self.bias = empty_parameter(out, device=device, dtype=dtype) if bias else None

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        heads = linear_op(self.deterministic)(x, self.weight, self.bias).view(x.shape[0], -1, self.head_dim)
        q, k, v = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        return q, k, v

    def after_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, norm: RMSNorm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(projection of norm(total), total), total = x + residual: [T, (heads + 2 kv heads) * head_dim], [T, hidden].

        x: the rank's summand of it (`RowParallelLinear.partial`); the whole if residual is None.
        """
        if self.deterministic or self.tp.size > 1:
            x, total = norm.add_partial(x, residual, self.tp)
            return linear_op(self.deterministic)(x, self.weight, self.bias), total
        return ops.add_rms_norm_linear(x, residual, norm.weight, norm.eps, self.weight, self.bias)

    def load(self, source: WeightSource, prefix: str) -> None:
        """Read the rank's heads of `prefix` + "q_proj", "k_proj" and "v_proj"."""
        first_kv_head = self.tp.rank * self.total_kv_heads // self.tp.size
        offset = 0
        for name, first, heads, total in (
            ("q_proj", self.tp.rank * self.num_heads, self.num_heads, self.total_heads),
            ("k_proj", first_kv_head, self.num_kv_heads, self.total_kv_heads),
            ("v_proj", first_kv_head, self.num_kv_heads, self.total_kv_heads),
        ):
            shape, rows = (total * self.head_dim, self.hidden_size), heads * self.head_dim
            _load_rows(self.weight, self.bias, offset, source, prefix + name, shape, first * self.head_dim, rows)
            offset += rows

    def load_interleaved(self, source: WeightSource, name: str) -> None:
        """Read the rank's heads of the one projection `name`: head by head, the rows of its q, then of its k, then v.

        Only for as many KV heads as query heads.
        """
        if self.total_heads != self.total_kv_heads:
            raise ValueError(f"{self.total_heads} query heads and {self.total_kv_heads} KV heads cannot be interleaved")
        rows, first = 3 * self.head_dim, self.tp.rank * self.num_heads
        bounds = 0, first * rows, (first + self.num_heads) * rows
        whole = self.total_heads * rows
        weight = source.slice(name + ".weight", (whole, self.hidden_size), *bounds)
        source.write(self.weight, self._parts_together(weight))
        if self.bias is not None:
            source.write(self.bias, self._parts_together(source.slice(name + ".bias", (whole,), *bounds)))

    def _parts_together(self, interleaved: torch.Tensor) -> torch.Tensor:
        """[heads * 3 * head_dim, ...], head by head -> the same rows, those of all q first, then k, then v."""
        return interleaved.unflatten(0, (self.num_heads, 3, self.head_dim)).transpose(0, 1).flatten(0, 2)


class RowParallelLinear(nn.Module):
    """A layer split by inputs: [T, in / tp] -> [T, out], the same on all ranks. The bias is added once."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        tp: TPGroup,
        device: torch.device,
        dtype: torch.dtype,
        deterministic: bool = False,
    ):
        super().__init__()
        self.in_features, self.out_features, self.tp = in_features, out_features, tp
        self.linear, self.deterministic = linear_op(deterministic), deterministic
        self.shard = shard_size(in_features, tp, "in_features")
        self.weight = empty_parameter(out_features, self.shard, device=device, dtype=dtype)
        self.bias = empty_parameter(out_features, device=device, dtype=dtype) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tp.all_reduce(self.partial(x))

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """The rank's summand of the output, for a sum that is fused with what follows it."""
        return self.linear(x, self.weight, self.bias if self.tp.rank == 0 else None)

    def onto(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output added to `residual` [T, out], in two parts as `RMSNorm.add_partial` takes them.

        For many tokens the product adds it in the same pass, which spares a norm two of its four passes over memory;
        `residual` is overwritten then.
        """
        if self.tp.size == 1 and not self.deterministic and self.bias is None and x.shape[0] >= ADD_TOKENS:
            return residual.addmm_(x, self.weight.t()), None
        return self.partial(x), residual

    def load(self, source: WeightSource, prefix: str) -> None:
        """Read `prefix` + ".weight" and ".bias"."""
        start, shape = self.tp.rank * self.shard, (self.out_features, self.in_features)
        source.write(self.weight, source.slice(prefix + ".weight", shape, 1, start, start + self.shard))
        if self.bias is not None:
            source.write(self.bias, source.tensor(prefix + ".bias", (self.out_features,)))


def _load_rows(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    offset: int,
    source: WeightSource,
    name: str,
    shape: tuple[int, int],
    start: int,
    rows: int,
) -> None:
    """Fill rows [offset, offset + rows) of a shard with rows [start, start + rows) of the stored [out, in]."""
    stop = start + rows
    source.write(weight[offset : offset + rows], source.slice(name + ".weight", shape, 0, start, stop))
    if bias is not None:
        source.write(bias[offset : offset + rows], source.slice(name + ".bias", shape[:1], 0, start, stop))
