"""Products of many tokens and weights in fewer bits by PyTorch's, of dequantised weights.

Some rows of W at a time are written to a buffer of a bounded size, and multiplied: 2 bytes a weight are written and
read, which takes the less of the time the more tokens there are.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from . import plans


def linear_dequantised(
    x: Tensor, outputs: int, bias: Tensor | None, dequantise: Callable[[int, Tensor], None]
) -> Tensor:
    """x W^T + bias -> a new tensor [T, outputs] of x's dtype, of checked arguments; x [T, K], bias [outputs].

    dequantise: (first row, out [rows, K]) -> rows of W from the first one on, written to `out` in x's dtype.
    """
    tokens, inputs = x.shape
    y = torch.empty((tokens, outputs), dtype=x.dtype, device=x.device)
    rows = plans.rows_at_once(outputs, inputs)
    buffer = torch.empty((rows, inputs), dtype=x.dtype, device=x.device)
    for first in range(0, outputs, rows):
        last = min(first + rows, outputs)
        part = buffer[: last - first]
        dequantise(first, part)
        if bias is None:
            torch.mm(x, part.t(), out=y[:, first:last])
        else:
            torch.addmm(bias[first:last], x, part.t(), out=y[:, first:last])
    return y
