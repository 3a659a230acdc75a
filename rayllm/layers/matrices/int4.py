"""`Int4Matrix`: a weight that stays in 4 bits, whatever the checkpoint's layout is."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rayllm.config.quantization import WeightFormat
from rayllm.errors import ModelError
from rayllm.layers.layer import BuildContext
from rayllm.layers.matrices.matrix import Activations, Matrix, Piece
from rayllm.layers.weights import WeightSource
from rayllm_kernels import ops
from rayllm_kernels.quantised.int4 import half_of, pack_int4
from rayllm_kernels.quantised.plans import LEAST_INT4_GROUP


class Int4Matrix(Matrix):
    """Tokens stay in the model's dtype.

    weight_codes, weight_scale, weight_zero: as of `Int4Weight`; no weight_zero if the format is symmetric.
    input_order: int64 [in], if neighbours may be of different groups (GPTQ's desc_act): the inputs group by group, as
    which the weight is kept.
    """

    def __init__(self, context: BuildContext, rows: int, columns: int, found: WeightFormat):
        group = found.block[1]
        scales = 1 if group is None else -(-columns // group), rows
        codes = context.parameter(rows, half_of(columns, group), dtype=torch.uint8)
        scale = context.parameter(*scales, dtype=torch.float32)
        self.parameters = {"weight_codes": codes, "weight_scale": scale}
        zero = order = None
        if not found.symmetric:
            zero = self.parameters["weight_zero"] = context.parameter(*scales, dtype=torch.uint8)
        if found.ordered and group is not None:
            order = self.parameters["input_order"] = context.parameter(columns, dtype=torch.int64)
        self._order, self._deterministic = order, context.deterministic
        self.fuses = order is None and not context.deterministic
        self._operand = ops.Int4Weight(codes, scale, zero, columns, group)

    @classmethod
    def make(
        cls, context: BuildContext, rows: int, columns: int, pieces: Sequence[Piece], found: WeightFormat
    ) -> Int4Matrix | None:
        """None for 8 bits, for other groups than the products have, and for groups that ranks would have to share."""
        group, inputs = found.block[1], pieces[0].columns.size
        if found.bits != 4 or (group is not None and group % LEAST_INT4_GROUP):
            return None
        if group is not None and columns < inputs and (found.ordered or columns % group):
            return None
        return cls(context, rows, columns, found)

    def load(self, source: WeightSource, pieces: Sequence[Piece]) -> None:
        codes, scale, zero, _, group = self._operand
        first: torch.Tensor | None = None
        for piece in pieces:
            numbers = source.numbers(piece.module, piece.rows, piece.columns)
            if self._order is not None:
                order = torch.argsort(numbers.groups, stable=True)
                regular = torch.arange(len(order), device=order.device) // (group or len(order))
                if not torch.equal(numbers.groups[order], regular):
                    source.check_found()
                    raise ModelError(f"the groups of {piece.module} have not {group} inputs each")
                if first is not None and not torch.equal(order, first):
                    raise ModelError(
                        f"the groups of {pieces[0].module} and {piece.module}, which are computed as one, have other "
                        'inputs (quantization "none" serves such a checkpoint)'
                    )
                first = order
                numbers = numbers._replace(values=numbers.values[:, order], groups=numbers.groups[order])
            own, (found_codes, found_scales, found_zeros) = piece.own_rows, pack_int4(numbers, group)
            source.write(codes[own], found_codes)
            source.write(scale[:, own], found_scales.T)
            if zero is not None:
                source.write(zero[:, own], found_zeros.T)
        if self._order is not None:
            assert first is not None
            source.write(self._order, first)

    def multiply(self, x: Activations, bias: torch.Tensor | None) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        if self._order is not None:
            x = x.index_select(1, self._order)
        return ops.linear_int4(x, self._operand, bias, deterministic=self._deterministic)

    def multiply_gated(self, x: Activations, act: str, wanted: ops.Rounding | None) -> Activations:  # noqa: ARG002
        assert isinstance(x, torch.Tensor)
        return ops.fused_linear_int4(x, self._operand, act=act)[0]

    def multiply_normed(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        norm: tuple[torch.Tensor, float],
        bias: torch.Tensor | None,
        *,
        act: str | None,
        wanted: ops.Rounding | None,  # noqa: ARG002
    ) -> tuple[Activations, torch.Tensor]:
        return ops.fused_linear_int4(x, self._operand, bias, norm=norm, residual=residual, act=act)
