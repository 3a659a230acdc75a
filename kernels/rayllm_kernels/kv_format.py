"""How the KV cache stores numbers: as they come, or in one byte with a scale for each KV head.

    stored = fp8(saturate(x / scale[head]));  x' = stored * scale[head]

"e4m3" has 4 bits of exponent and 3 of mantissa and ends at 448, "e5m2" has 5 and 2 and ends at 57344 (Micikevicius et
al., "FP8 formats for deep learning", 2022; e4m3 is the variant without infinities). Rounding is to nearest, ties to
even; what is beyond the largest number becomes it, and NaN stays NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

FP8_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


class KVScales(NamedTuple):
    """Of one layer, each [Hkv] fp32, positive: what stored keys and values are multiplied by when they are read."""

    k: Tensor
    v: Tensor


def is_fp8(cache: Tensor) -> bool:
    """Whether a cache needs scales."""
    return cache.dtype in FP8_MAX


def quantise(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x [..., Hkv, D] of any float dtype in an fp8 dtype, as above. scale: [Hkv]."""
    limit = FP8_MAX[dtype]
    return (x.float() / scale[:, None]).clamp(-limit, limit).to(dtype)


def as_bytes(cache: Tensor) -> Tensor:
    """An fp8 tensor as the bytes that it is, for torch's indexing; others as they are."""
    return cache.view(torch.uint8) if is_fp8(cache) else cache
