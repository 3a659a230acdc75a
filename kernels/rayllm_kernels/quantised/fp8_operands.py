"""What fp8 products multiply: rounded activations and weights (e4m3) with their scales."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Rounding(NamedTuple):
    """How activations become fp8.

    group: neighbouring inputs that share a scale, a power of two; None is all of a token's. scale: float32 [1], found
    beforehand, of all tokens; None: each group's largest number decides.
    """

    group: int | None = None
    scale: Tensor | None = None


class Fp8Rows(NamedTuple):
    """Activations [T, K] in e4m3. scales: float32 [T, ceil(K / group)], multiplied. group: as for `Rounding`.

    Scales are contiguous, or lie in memory group by group, `scales.stride(1)` apart: a multiple of 4, and both tensors
    have room for as many tokens.
    """

    values: Tensor
    scales: Tensor
    group: int | None = None

    @property
    def by_group(self) -> bool:
        return self.group is not None and not self.scales.is_contiguous()

    def dequantised(self) -> Tensor:
        """float32 [T, K]."""
        scales = self.scales
        if self.group is not None:
            scales = scales.repeat_interleave(self.group, 1)[:, : self.values.shape[1]]
        return self.values.float() * scales


class Fp8Weight(NamedTuple):
    """A weight [N, K] in e4m3. scales: float32 [ceil(N / rows), ceil(K / group)], multiplied.

    rows: outputs that share a scale. group: inputs that do, a power of two from 32 to 128; None is all of them, and
    rows is 1 then.
    """

    values: Tensor
    scales: Tensor
    rows: int = 1
    group: int | None = None

    def dequantised(self) -> Tensor:
        """float32 [N, K]."""
        (outputs, inputs), scales = self.values.shape, self.scales
        if self.rows > 1:
            scales = scales.repeat_interleave(self.rows, 0)[:outputs]
        if self.group is not None:
            scales = scales.repeat_interleave(self.group, 1)[:, :inputs]
        return self.values.float() * scales
