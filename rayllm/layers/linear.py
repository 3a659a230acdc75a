"""Linear layers split over tensor-parallel ranks: columns (outputs) or rows (inputs) of the weight.

Column-parallel layers leave each rank its own part of the output; a row-parallel layer takes such parts in and sums its
partial products over the ranks (Shoeybi et al., 2019). Weights are [out, in], as in `torch.nn.Linear`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from rayllm.layers.activation import SILU, gated_activation
from rayllm.layers.layer import BuildContext, Heads, Layer
from rayllm.layers.lora import Adaptable, ProjectionAdapters
from rayllm.layers.norm import RMSNorm
from rayllm.layers.weights import WeightSource
from rayllm_kernels import ops

ADD_TOKENS = 1024  # from here on a norm is bound by memory, not by its launch


class Part(NamedTuple):
    """The rows that a rank has of one projection's weight [total, in] and bias [total], called `name` in the layer."""

    name: str
    total: int
    start: int
    rows: int


def column_part(context: BuildContext, name: str, total: int) -> Part:
    """The rank's share of all rows."""
    rows = context.shard(total, name)
    return Part(name, total, context.tp.rank * rows, rows)


def qkv_parts(context: BuildContext, heads: Heads) -> list[Part]:
    """The rank's query heads, and the KV heads that they use: its share of them, or one."""
    tp, (num_heads, num_kv_heads, head_dim) = context.tp, heads
    kv_rows = num_kv_heads * head_dim, tp.rank * num_kv_heads // tp.size * head_dim
    kv = [Part(name, *kv_rows, max(1, num_kv_heads // tp.size) * head_dim) for name in ("k_proj", "v_proj")]
    return [column_part(context, "q_proj", num_heads * head_dim), *kv]


def gated_qkv_parts(context: BuildContext, heads: Heads) -> list[Part]:
    """`qkv_parts` of a q_proj that has a gate behind each query head, with the gates before all else."""
    num_heads, _, head_dim = heads
    count = context.shard(num_heads, "q_proj")
    own = range(context.tp.rank * count, (context.tp.rank + 1) * count)
    total = 2 * num_heads * head_dim
    gates = [Part("q_proj", total, (2 * head + 1) * head_dim, head_dim) for head in own]
    queries = [Part("q_proj", total, 2 * head * head_dim, head_dim) for head in own]
    return [*gates, *queries, *qkv_parts(context, heads)[1:]]


def stored_as_one(name: str, parts: list[Part]) -> list[Part]:
    """`parts` of a checkpoint that has them as one weight called `name`, the rows of one after those of another."""
    total, start, stored = sum(part.total for part in parts), 0, []
    for part in parts:
        stored.append(Part(name, total, start + part.start, part.rows))
        start += part.total
    return stored


class Linear(Layer):
    """x W^T + bias, by the rank's part [out, in] of the weight. Which part it is, is for the classes below."""

    def __init__(self, context: BuildContext, in_features: int, out_features: int, bias: bool):
        super().__init__(context)
        self.weight = context.parameter(out_features, in_features)
        self.bias = context.parameter(out_features) if bias else None
        # (x, weight, bias) -> x W^T + bias
        self.product: Callable[..., torch.Tensor] = ops.linear_invariant if context.deterministic else ops.linear
        # Whether products may take in what comes before or after them.
        self.fuses = context.tp.size == 1 and not context.deterministic
        self.adapters: ProjectionAdapters | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the step's tokens get the product alone, because none has an adapter."""
        return self.adapters is None or self.adapters.state.is_idle

    def adapt(self, context: BuildContext, modules: list[Adaptable]) -> None:
        """Have the product add what adapters of these modules add to it, if the context has any."""
        if context.adapters is None:
            return
        product, (_outputs, inputs), dtype = self.product, self.weight.shape, context.dtype
        adapters = self.adapters = ProjectionAdapters(
            context.adapters, inputs, modules, context.device, dtype, deterministic=context.deterministic
        )
        self.product = lambda x, weight, bias: adapters.add(x, product(x, weight, bias))


class ColumnLinear(Linear):
    """One projection, or several of one input as one matrix product, split by outputs.

    parts: `column_part` of each, or `qkv_parts`, or either as `stored_as_one`; named within the context. The classes
    below have a context of their own.
    forward: [T, in] -> [T, sum of the parts' rows], the rank's parts side by side.
    """

    gated = False  # whether the output is act(gate) * up of two parts

    def __init__(self, context: BuildContext, in_features: int, parts: list[Part], *, bias: bool):
        super().__init__(context, in_features, sum(part.rows for part in parts), bias)
        self.parts = parts
        self.adapt(context, self.adaptable())

    def adaptable(self) -> list[Adaptable]:
        """The checkpoint's modules, of which one may be several parts."""
        modules = []
        for name, same in itertools.groupby(self.parts, key=lambda part: part.name):
            parts, inputs = list(same), self.weight.shape[1]
            rows = partial(_rows_of, parts)
            num_rows = sum(part.rows for part in parts)
            modules.append(Adaptable(self.prefix + name, inputs, parts[0].total, slice(None), rows, num_rows))
        return modules

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x, self.weight, self.bias)

    def after_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, norm: RMSNorm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(`forward` of norm(total), total), total = x + residual [T, in].

        x: the rank's summand of it (`RowLinear.partial`); the whole if residual is None.
        """
        if self.fuses and self.is_plain:
            return ops.add_rms_norm_linear(x, residual, norm.weight, norm.eps, self.weight, self.bias, gated=self.gated)
        x, total = norm.add_partial(x, residual)
        return self.forward(x), total

    def load(self, source: WeightSource) -> None:
        offset = 0
        for name, total, start, rows in self.parts:
            for field, parameter in self.named_parameters(recurse=False):
                shape = (total, *parameter.shape[1:])
                stored = source.slice(f"{self.prefix}{name}.{field}", shape, 0, start, start + rows)
                source.write(parameter[offset : offset + rows], stored)
            offset += rows


class GatedLinear(ColumnLinear):
    """act(gate) * up, the two parts being projections of one input and of one size: [T, in] -> [T, rows of a part]."""

    gated = True

    def __init__(self, context: BuildContext, in_features: int, parts: list[Part], act: str, *, bias: bool):
        super().__init__(context, in_features, parts, bias=bias)
        self.act = gated_activation(act, context)
        self.fuses_act = act in SILU and not bias and not context.deterministic
        self.fuses = self.fuses and self.fuses_act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fuses_act and self.is_plain:
            return ops.linear_silu_mul(x, self.weight)
        return self.act(self.product(x, self.weight, self.bias))


class InterleavedQKVLinear(ColumnLinear):
    """Query, key and value projections stored as one: head by head, the rows of its q, then of its k, then v.

    Only for as many KV heads as query heads.
    """

    def __init__(self, context: BuildContext, in_features: int, heads: Heads, *, bias: bool):
        super().__init__(context, in_features, qkv_parts(context, heads), bias=bias)
        self.head_dim = heads.head_dim

    def adaptable(self) -> list[Adaptable]:
        (rows, inputs), total, start = self.weight.shape, 3 * self.parts[0].total, 3 * self.parts[0].start
        own = slice(start, start + rows)
        return [Adaptable(self.prefix[:-1], inputs, total, slice(None), lambda b: self._in_parts(b[own]), rows)]

    def _in_parts(self, stored: torch.Tensor) -> torch.Tensor:
        """The rank's rows as the checkpoint has them, those of all queries first, then of keys, then of values."""
        return stored.unflatten(0, (-1, 3, self.head_dim)).transpose(0, 1).flatten(0, 2)

    def load(self, source: WeightSource) -> None:
        total, start = 3 * self.parts[0].total, 3 * self.parts[0].start
        for field, parameter in self.named_parameters(recurse=False):
            rows, *rest = parameter.shape
            stored = source.slice(self.prefix + field, (total, *rest), 0, start, start + rows)
            source.write(parameter, self._in_parts(stored))


class RowLinear(Linear):
    """A projection split by inputs: [T, in / tp] -> [T, out], the same on all ranks. The bias is added once."""

    def __init__(self, context: BuildContext, in_features: int, out_features: int, *, bias: bool):
        super().__init__(context, context.shard(in_features, "in_features"), out_features, bias)
        self.in_features = in_features
        self.adds = self.fuses and not bias
        shard = self.weight.shape[1]
        columns = slice(self.tp.rank * shard, (self.tp.rank + 1) * shard)
        self.adapt(
            context, [Adaptable(self.prefix[:-1], in_features, out_features, columns, lambda b: b, out_features)]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tp.all_reduce(self.partial(x))

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """The rank's summand of the output, for a sum that is fused with what follows it."""
        return self.product(x, self.weight, self.bias if self.tp.rank == 0 else None)

    def onto(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output added to `residual` [T, out], in two parts as `RMSNorm.add_partial` takes them.

        For many tokens the product adds it in the same pass, which spares a norm two of its four passes over memory;
        `residual` is overwritten then.
        """
        if self.adds and x.shape[0] >= ADD_TOKENS:
            total = residual.addmm_(x, self.weight.t())
            return (total if self.adapters is None else self.adapters.add(x, total)), None
        return self.partial(x), residual

    def load(self, source: WeightSource) -> None:
        out_features, shard = self.weight.shape
        start, shape = self.tp.rank * shard, (out_features, self.in_features)
        source.write(self.weight, source.slice(self.prefix + "weight", shape, 1, start, start + shard))
        if self.bias is not None:
            source.write(self.bias, source.tensor(self.prefix + "bias", (out_features,)))


def _rows_of(parts: list[Part], stored: torch.Tensor) -> torch.Tensor:
    """The rank's rows of these parts of one stored tensor, one after the other."""
    pieces = [stored[part.start : part.start + part.rows] for part in parts]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
