"""The Triton launchers under one name each. Importing this module imports triton."""

from __future__ import annotations

from .copy_blocks import copy_blocks
from .decode_inputs import decode_inputs
from .gumbel_argmax import gumbel_argmax
from .linear import add_rms_norm_linear, add_rms_norm_linear_silu_mul, linear, linear_silu_mul
from .paged_decode_attention import paged_decode_attention
from .paged_prefill_attention import paged_prefill_attention
from .qk_norm_rope_cache import qk_norm_rope_cache
from .reshape_and_cache import reshape_and_cache
from .rms_norm import fused_add_rms_norm, rms_norm
from .rotary_embedding import rotary_embedding
from .silu_and_mul import silu_and_mul

__all__ = [
    "add_rms_norm_linear",
    "add_rms_norm_linear_silu_mul",
    "copy_blocks",
    "decode_inputs",
    "fused_add_rms_norm",
    "gumbel_argmax",
    "linear",
    "linear_silu_mul",
    "paged_decode_attention",
    "paged_prefill_attention",
    "qk_norm_rope_cache",
    "reshape_and_cache",
    "rms_norm",
    "rotary_embedding",
    "silu_and_mul",
]
