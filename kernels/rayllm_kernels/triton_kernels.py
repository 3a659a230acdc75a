"""The Triton launchers under one name each. Importing this module imports triton."""

from __future__ import annotations

from .copy_blocks import copy_blocks
from .decode_inputs import decode_inputs
from .decode_schedule import decode_schedule
from .gather_logprobs import gather_logprobs
from .gumbel_argmax import gumbel_argmax, gumbel_keys
from .linear import add_rms_norm_linear, add_rms_norm_linear_silu_mul, linear, linear_silu_mul
from .linear_invariant import linear_invariant
from .paged_decode_attention import paged_decode_attention
from .paged_prefill_attention import paged_prefill_attention
from .penalise import penalise
from .qk_norm_rope_cache import qk_norm_rope_cache
from .reshape_and_cache import reshape_and_cache
from .rms_norm import fused_add_rms_norm, rms_norm
from .rotary_embedding import rotary_embedding
from .silu_and_mul import silu_and_mul
from .truncate_draws import truncate_draws

__all__ = [
    "add_rms_norm_linear",
    "add_rms_norm_linear_silu_mul",
    "copy_blocks",
    "decode_inputs",
    "decode_schedule",
    "fused_add_rms_norm",
    "gather_logprobs",
    "gumbel_argmax",
    "gumbel_keys",
    "linear",
    "linear_invariant",
    "linear_silu_mul",
    "paged_decode_attention",
    "paged_prefill_attention",
    "penalise",
    "qk_norm_rope_cache",
    "reshape_and_cache",
    "rms_norm",
    "rotary_embedding",
    "silu_and_mul",
    "truncate_draws",
]
