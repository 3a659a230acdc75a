"""`Fp8Matrix`: a weight that stays in e4m3."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from rayllm.config.quantization import WeightFormat
from rayllm.layers.layer import BuildContext
from rayllm.layers.matrices.matrix import Activations, Matrix, Piece
from rayllm.layers.weights import WeightSource
from rayllm_kernels import ops
from rayllm_kernels.device import hardware

LEAST_GROUP, LARGEST_GROUP = 32, 128  # inputs that share a scale, for products


class Granule(NamedTuple):
    """Rows and inputs of a rank's matrix that share a scale; group None: all inputs."""

    rows: int
    group: int | None


class Fp8Matrix(Matrix):
    """Scales are kept for as large blocks as those of the checkpoint can be cut into at the borders of the pieces.

    weight: [out, in] e4m3. weight_scale: float32 [out / rows, in / group]. input_scale: float32 [1], if one was found
    beforehand; of several projections the largest.

    Tokens are rounded to e4m3 too where the checkpoint says so and the GPU multiplies it, and on CPUs: each with a
    scale, with one a group of inputs where the weight has groups, or all with the checkpoint's.
    """

    def __init__(self, context: BuildContext, rows: int, columns: int, found: WeightFormat, granule: Granule):
        groups = 1 if granule.group is None else -(-columns // granule.group)
        self.weight = context.parameter(rows, columns, dtype=torch.float8_e4m3fn)
        self.weight_scale = context.parameter(-(-rows // granule.rows), groups, dtype=torch.float32)
        self.parameters = {"weight": self.weight, "weight_scale": self.weight_scale}
        self.input_scale = None
        if found.activations == "static" and granule.group is None:
            self.input_scale = self.parameters["input_scale"] = context.parameter(1, dtype=torch.float32)
        if found.activations is not None and hardware(context.device).has_e4m3:
            self.takes = ops.Rounding(granule.group, self.input_scale)
        self.fuses = not context.deterministic
        self._operand = ops.Fp8Weight(self.weight, self.weight_scale, *granule)
        self._dtype, self._deterministic = context.dtype, context.deterministic

    @classmethod
    def make(
        cls, context: BuildContext, rows: int, columns: int, pieces: Sequence[Piece], found: WeightFormat
    ) -> Fp8Matrix | None:
        """None where no product has scales for blocks that are cut so."""
        granule = granule_of(found, pieces)
        return None if granule is None else cls(context, rows, columns, found, granule)

    def load(self, source: WeightSource, pieces: Sequence[Piece]) -> None:
        _, _, rows, group = self._operand
        for piece in pieces:
            numbers = source.numbers(piece.module, piece.rows, piece.columns)
            source.write(self.weight[piece.own_rows], numbers.values)
            scales = numbers.scales.float()[::rows][:, numbers.groups[:: group or len(numbers.groups)]]
            first = piece.at // rows
            source.write(self.weight_scale[first : first + len(scales)], scales)
        if self.input_scale is not None:
            scales = torch.stack([source.activation_scale(piece.module).float() for piece in pieces])
            source.write(self.input_scale, scales.amax(0))

    def multiply(self, x: Activations, bias: torch.Tensor | None) -> torch.Tensor:
        if isinstance(x, ops.Fp8Rows):
            return ops.linear_fp8(x, self._operand, bias, self._dtype, deterministic=self._deterministic)
        if self.takes is None:
            return ops.linear_fp8_weight(x, self._operand, bias, deterministic=self._deterministic)
        y, _ = ops.linear_rounding_fp8(x, self.takes, self._operand, bias, deterministic=self._deterministic)
        assert isinstance(y, torch.Tensor)
        return y

    def multiply_gated(self, x: Activations, act: str, wanted: ops.Rounding | None) -> Activations:
        if isinstance(x, torch.Tensor):
            if self.takes is None:
                return ops.fused_linear_fp8_weight(x, self._operand, act=act)[0]
            return ops.linear_rounding_fp8(x, self.takes, self._operand, act=act, wanted=wanted)[0]
        y = ops.linear_fp8(x, self._operand, None, self._dtype)
        return ops.act_and_mul(y, act) if wanted is None else ops.act_and_mul_fp8(y, wanted, act)

    def multiply_normed(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        norm: tuple[torch.Tensor, float],
        bias: torch.Tensor | None,
        *,
        act: str | None,
        wanted: ops.Rounding | None,
    ) -> tuple[Activations, torch.Tensor]:
        if self.takes is None:
            return ops.fused_linear_fp8_weight(x, self._operand, bias, norm=norm, residual=residual, act=act)
        return ops.linear_rounding_fp8(
            x, self.takes, self._operand, bias, norm=norm, residual=residual, act=act, wanted=wanted
        )


def granule_of(found: WeightFormat, pieces: Sequence[Piece]) -> Granule | None:
    """The largest that the blocks of a format are cut into at the borders of pieces; None if it is too small."""
    rows, columns = found.block
    if columns is None:  # a scale a channel, or a tensor, of which a layer may have several
        return Granule(1, None)
    group = math.gcd(LARGEST_GROUP, columns, *(piece.columns.start for piece in pieces))
    if group < LEAST_GROUP:
        return None
    return Granule(math.gcd(rows or 1, *(border for piece in pieces for border in (piece.rows.start, piece.at))), group)
