"""How the row-wise kernels see a tensor of 1 to 3 dimensions: as rows that lie in two nested strides."""

from __future__ import annotations

from torch import Tensor


def row_layout(x: Tensor) -> tuple[int, int, tuple[int, int]]:
    """The rows of a tensor that passed `check_rows`: (number of rows, rows per outer step, (outer, inner stride)).

    Row r starts at (r // inner) * outer_stride + (r % inner) * inner_stride elements.
    """
    if x.dim() == 3:
        return x.shape[0] * x.shape[1], max(x.shape[1], 1), (x.stride(0), x.stride(1))
    if x.dim() == 2:
        return x.shape[0], max(x.shape[0], 1), (0, x.stride(0))
    rows = x.numel() // max(x.shape[-1], 1)
    return rows, max(rows, 1), (0, x.shape[-1])
