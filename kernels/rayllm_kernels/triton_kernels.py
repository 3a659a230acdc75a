"""The Triton launchers under one name each. Importing this module imports triton."""

from __future__ import annotations

from .copy_blocks import copy_blocks
from .decode_inputs import decode_inputs
from .gumbel_argmax import gumbel_argmax
from .paged_decode_attention import paged_decode_attention
from .paged_prefill_attention import paged_prefill_attention
from .reshape_and_cache import reshape_and_cache
from .rms_norm import fused_add_rms_norm, rms_norm
from .rotary_embedding import rotary_embedding
from .silu_and_mul import silu_and_mul

__all__ = [
    "copy_blocks",
    "decode_inputs",
    "fused_add_rms_norm",
    "gumbel_argmax",
    "paged_decode_attention",
    "paged_prefill_attention",
    "reshape_and_cache",
    "rms_norm",
    "rotary_embedding",
    "silu_and_mul",
]
