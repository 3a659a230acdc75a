"""Linear layers split over tensor-parallel ranks: columns (outputs) or rows (inputs) of the weight.

Column-parallel layers leave each rank its own part of the output; a row-parallel layer takes such parts in and sums its
partial products over the ranks (Shoeybi et al., 2019). Weights are [out, in], as in `torch.nn.Linear`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from rayllm.layers.activation import gated_activation
from rayllm.layers.layer import BuildContext, Heads, Layer
from rayllm.layers.lora import Adaptable, ProjectionAdapters
from rayllm.layers.matrices.make import make_matrix
from rayllm.layers.matrices.matrix import Activations, Piece
from rayllm.layers.norm import RMSNorm, Summand
from rayllm.layers.weights import Span, WeightSource
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
    """x W^T + bias, by the rank's part [out, in] of the weight. Which part it is, is for the classes below.

    pieces: of the checkpoint's weights, which make the matrix. What the matrix is in, it knows itself
    (`layers/matrices/`).
    """

    def __init__(
        self, context: BuildContext, in_features: int, out_features: int, pieces: Sequence[Piece], *, bias: bool
    ):
        super().__init__(context)
        self.pieces, self.in_features, self.out_features = pieces, in_features, out_features
        self.matrix = make_matrix(context, out_features, in_features, pieces)
        for name, parameter in self.matrix.parameters.items():
            self.register_parameter(name, parameter)
        self.bias = context.parameter(out_features) if bias else None
        # (x, bias) -> x W^T + bias
        self.product: Callable[..., torch.Tensor] = self.matrix.multiply
        # Whether products may take in what comes before or after them.
        self.fuses = self.matrix.fuses and context.tp.size == 1
        self.adapters: ProjectionAdapters | None = None

    @property
    def num_weights(self) -> int:
        """Of the matrix, whatever their bits are."""
        return self.in_features * self.out_features

    @property
    def is_one_pass(self) -> bool:
        """Whether the matrix computes all that the step's tokens get: none has an adapter, or it adds what they do."""
        return self.matrix.adapts or self.adapters is None or self.adapters.state.is_idle

    def takes(self) -> ops.Rounding | None:
        """How the step's tokens should be rounded by whoever makes them; None for not at all."""
        return self.matrix.takes if self.is_one_pass else None

    def adapt(self, context: BuildContext, modules: list[Adaptable]) -> None:
        """Have the product add what adapters of these modules add to it, if the context has any."""
        if context.adapters is None:
            return
        product, inputs, dtype = self.product, self.in_features, context.dtype
        adapters = self.adapters = ProjectionAdapters(
            context.adapters, inputs, modules, context.device, dtype, deterministic=context.deterministic
        )
        if self.matrix.adapts:
            self.matrix.adapters = adapters
        else:
            self.product = lambda x, bias: adapters.add(x, product(x, bias))


class ColumnLinear(Linear):
    """One projection, or several of one input as one matrix product, split by outputs.

    parts: `column_part` of each, or `qkv_parts`, or either as `stored_as_one`; named within the context. The classes
    below have a context of their own.
    forward: [T, in] -> [T, sum of the parts' rows], the rank's parts side by side.
    """

    gate_act: str | None = None  # if the output is act(gate) * up of two parts

    def __init__(self, context: BuildContext, in_features: int, parts: list[Part], *, bias: bool):
        columns, pieces, at = Span(0, in_features, in_features), [], 0
        for name, total, start, rows in parts:
            pieces.append(Piece(context.prefix + name, Span(start, start + rows, total), columns, at))
            at += rows
        super().__init__(context, in_features, at, pieces, bias=bias)
        self.parts = parts
        # How the output should be rounded, if it is made in a pass of its own.
        self.wanted: Callable[[], ops.Rounding | None] = _in_dtype
        self.adapt(context, self.adaptable())

    def adaptable(self) -> list[Adaptable]:
        """The checkpoint's modules, of which one may be several parts."""
        modules = []
        for name, same in itertools.groupby(self.parts, key=lambda part: part.name):
            parts, inputs = list(same), self.in_features
            rows = partial(_rows_of, parts)
            num_rows = sum(part.rows for part in parts)
            modules.append(Adaptable(self.prefix + name, inputs, parts[0].total, slice(None), rows, num_rows))
        return modules

    def forward(self, x: Activations) -> Activations:
        return self.product(x, self.bias)

    def after_norm(self, x: Summand, residual: torch.Tensor | None, norm: RMSNorm) -> tuple[Any, torch.Tensor]:
        """(`forward` of norm(total), total), total = x + residual [T, in].

        The first is a tensor, but for what `feeds` another layer: that is for its consumer, in whatever form.
        x: the rank's summand of it (`RowLinear.partial`); the whole if residual is None.
        """
        if self.fuses and self.is_one_pass and isinstance(x, torch.Tensor):
            return self.matrix.multiply_normed(
                x, residual, (norm.weight, norm.eps), self.bias, act=self.gate_act, wanted=self.wanted()
            )
        normed, total = norm.add_partial(x, residual, self.takes())
        return self.forward(normed), total

    def load(self, source: WeightSource) -> None:
        self.matrix.load(source, self.pieces)
        if self.bias is not None:
            for module, (start, stop, total), _, at in self.pieces:
                stored = source.slice(module + ".bias", (total,), 0, start, stop)
                source.write(self.bias[at : at + stop - start], stored)


class GatedLinear(ColumnLinear):
    """act(gate) * up, the two parts being projections of one input and of one size: [T, in] -> [T, rows of a part]."""

    def __init__(self, context: BuildContext, in_features: int, parts: list[Part], act: str, *, bias: bool):
        super().__init__(context, in_features, parts, bias=bias)
        self.gate_act, self.act = act, gated_activation(act, context)
        # The deterministic mode has an activation of its own on CPUs.
        self.rounds_act = not context.deterministic
        self.fuses_act = not bias and self.matrix.fuses
        self.fuses = self.fuses and self.fuses_act

    def feeds(self, consumer: Linear) -> None:
        """Have the output rounded as `consumer` takes it, which nothing else reads."""
        if self.rounds_act:
            self.wanted = consumer.takes

    def forward(self, x: Activations) -> Activations:
        assert self.gate_act is not None
        if self.fuses_act and self.is_one_pass:
            return self.matrix.multiply_gated(x, self.gate_act, self.wanted())
        y, rounding = self.product(x, self.bias), self.wanted()
        return self.act(y) if rounding is None else ops.act_and_mul_fp8(y, rounding, self.gate_act)


class InterleavedQKVLinear(ColumnLinear):
    """Query, key and value projections stored as one: head by head, the rows of its q, then of its k, then v.

    Only for as many KV heads as query heads.
    """

    def __init__(self, context: BuildContext, in_features: int, heads: Heads, *, bias: bool):
        super().__init__(context.unquantised, in_features, qkv_parts(context, heads), bias=bias)
        self.head_dim = heads.head_dim

    def adaptable(self) -> list[Adaptable]:
        rows, inputs = self.out_features, self.in_features
        total, start = 3 * self.parts[0].total, 3 * self.parts[0].start
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
        shard, module = context.shard(in_features, "in_features"), context.prefix[:-1]
        own = Span(context.tp.rank * shard, (context.tp.rank + 1) * shard, in_features)
        piece = Piece(module, Span(0, out_features, out_features), own, 0)
        super().__init__(context, shard, out_features, [piece], bias=bias)
        self.adds = self.fuses and self.matrix.adds and not bias
        columns = slice(own.start, own.stop)
        self.adapt(context, [Adaptable(module, in_features, out_features, columns, lambda b: b, out_features)])

    def forward(self, x: Activations) -> torch.Tensor:
        return self.tp.all_reduce(self.partial(x))

    def partial(self, x: Activations) -> torch.Tensor:
        """The rank's summand of the output, for a sum that is fused with what follows it."""
        return self.product(x, self.bias if self.tp.rank == 0 else None)

    def onto(self, x: Activations, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output added to `residual` [T, out], in two parts as `RMSNorm.add_partial` takes them.

        For many tokens the product adds it in the same pass, which spares a norm two of its four passes over memory;
        `residual` is overwritten then.
        """
        if self.adds and residual.shape[0] >= ADD_TOKENS:
            assert isinstance(x, torch.Tensor)
            total = self.matrix.add_to(residual, x)
            return (total if self.adapters is None else self.adapters.add(x, total)), None
        return self.partial(x), residual

    def load(self, source: WeightSource) -> None:
        self.matrix.load(source, self.pieces)
        if self.bias is not None:
            source.write(self.bias, source.tensor(self.prefix + "bias", (self.out_features,)))


def _in_dtype() -> None:
    """The `takes` of whoever wants tokens in the model's dtype."""


def _rows_of(parts: list[Part], stored: torch.Tensor) -> torch.Tensor:
    """The rank's rows of these parts of one stored tensor, one after the other."""
    pieces = [stored[part.start : part.start + part.rows] for part in parts]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
