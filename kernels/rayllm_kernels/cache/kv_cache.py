"""The KV cache of a layer, and how it stores numbers: as they come, or in one byte with a scale for each KV head.

    stored = fp8(saturate(x / scale[head]));  x' = stored * scale[head]

"e4m3" has 4 bits of exponent and 3 of mantissa and ends at 448, "e5m2" has 5 and 2 and ends at 57344 (Micikevicius et
al., "FP8 formats for deep learning", 2022; e4m3 is the variant without infinities). Rounding is to nearest, ties to
even; what is beyond the largest number becomes it, and NaN stays NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import FLOAT_DTYPES, check_float, check_last_dim, check_like, check_vectors, fail
from ..device import hardware

FP8_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


class KVScales(NamedTuple):
    """What the stored keys and values of a layer are multiplied by when they are read, each [Hkv] fp32, positive."""

    k: Tensor
    v: Tensor


class KVCache(NamedTuple):
    """Keys and values of one layer, each [num_blocks, Hkv, block_size, D], in the model's dtype or in fp8.

    Both have the same strides, the last of them 1, as two slices of one pool have, or two contiguous tensors: so a
    kernel computes one offset for both. An fp8 cache has an even head size.

    A cache of latents (`latent_cache`) holds no values of their own: v is a view of the first entries of k, of which
    there are more. It is not in fp8.
    """

    k: Tensor
    v: Tensor
    scales: KVScales | None = None  # exactly if the cache is in fp8

    @property
    def is_latent(self) -> bool:
        """Whether values are the first entries of the keys."""
        return self.v.shape[3] < self.k.shape[3]

    def _check_latent(self) -> None:
        """Raise ValueError unless v is a view of the first entries of k, as the only one whose shape may differ."""
        k, v, _ = self
        if v.shape[:3] != k.shape[:3] or v.stride() != k.stride() or v.shape[3] > k.shape[3]:
            like = f"must have the shape and the strides of cache.k, {tuple(k.shape)} and {k.stride()}"
            fail("cache.v", like, f"{tuple(v.shape)} and {v.stride()}")
        if v.data_ptr() != k.data_ptr():
            fail("cache.v", "must be the first entries of cache.k if it has fewer", v.shape)
        if k.dtype in FP8_MAX:
            fail("cache.k", "must not be in fp8 if cache.v is a part of it", k.dtype)

    def check(self, tensor: Tensor, argument: str) -> None:
        """Raise ValueError unless the cache is as above, and goes with `tensor`, on the same device.

        `tensor` must have the cache's dtype; beside an fp8 cache it may be of any float dtype.
        """
        k, v, scales = self
        if k.dim() != 4:
            fail("cache.k", "must be [num_blocks, num_kv_heads, block_size, head_dim]", k.shape)
        if k.dtype not in FLOAT_DTYPES and k.dtype not in FP8_MAX:
            fail("cache.k", "must be float32, float16, bfloat16, float8_e4m3fn or float8_e5m2", k.dtype)
        check_last_dim(k, "cache.k")
        if v.shape != k.shape or v.stride() != k.stride():
            self._check_latent()
        check_like(v, "cache.v", k, "cache.k")
        if k.dtype not in FP8_MAX:
            check_like(tensor, argument, k, "cache.k")
            if scales is not None:
                fail("cache.scales", f"must be None for a cache of {k.dtype}", scales)
            return
        if k.dtype == torch.float8_e4m3fn and not hardware(k.device).has_e4m3:
            fail("cache.k", "in float8_e4m3fn needs compute capability 8.9 or more", hardware(k.device).capability)
        for name, part in (("cache.k", k), ("cache.v", v)):
            layout = (k.shape[3], *part.stride()[:3], part.storage_offset())
            if any(number % 2 for number in layout):
                fail(name, "in fp8 must have an even head_dim, even strides and an even offset", layout)
        check_float(tensor, argument)
        if tensor.device != k.device:
            fail(argument, f"must be on the device of cache.k, {k.device}", tensor.device)
        if scales is None:
            fail("cache.scales", f"must be given for a cache of {k.dtype}", scales)
        check_vectors(k.shape[1], torch.float32, k.device, **{"cache.scales.k": scales.k, "cache.scales.v": scales.v})


def latent_cache(rows: Tensor, value_dim: int) -> KVCache:
    """The cache whose keys are `rows` [num_blocks, 1, block_size, D], and whose values are their first entries.

    Multi-head latent attention (DeepSeek-V2, 2024) has such a one: a token's latent, of value_dim entries, and a
    rotated key behind it, for all heads together.
    """
    return KVCache(rows, rows[..., :value_dim])


def quantise(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x [..., Hkv, D] of any float dtype in an fp8 dtype, as above. scale: [Hkv]."""
    limit = FP8_MAX[dtype]
    return (x.float() / scale[:, None]).clamp(-limit, limit).to(dtype)


def as_bytes(cache: Tensor) -> Tensor:
    """An fp8 tensor as the bytes that it is, for torch's indexing; others as they are."""
    return cache.view(torch.uint8) if cache.dtype in FP8_MAX else cache
