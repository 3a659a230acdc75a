"""The kernels as the engine calls them: CUDA tensors go to Triton, CPU tensors to the torch reference.

Nothing falls back: on CUDA a missing or failing Triton is an error. Every function checks its arguments and raises
ValueError naming the one at fault; none reads tensor contents on a CUDA device, so none synchronises with it and all
can be captured in a CUDA graph.

Names of dimensions: T tokens, B sequences, Hq query heads, Hkv KV heads (Hq a multiple of Hkv), D head size (up to 512,
and 128 more for the keys of a cache of latents; sizes that are no power of two are padded on chip). block_size is any
positive integer. Dtypes are fp32, fp16 and bf16; a cache may also be in fp8, float8_e5m2 or, from compute capability
8.9 on, float8_e4m3fn.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from .attention.context import Contexts, Scoring
from .attention.decode import paged_decode_attention
from .attention.expanded import PIECE_KEYS, KeyPiece, expanded_prefill_attention, latent_rows
from .attention.prefill import paged_prefill_attention
from .attention.schedule import DecodeSchedule, decode_schedule
from .cache.copy_blocks import copy_blocks
from .cache.decode_inputs import DecodeInputs, decode_inputs
from .cache.kv_cache import KVCache, KVScales, latent_cache
from .cache.reshape_and_cache import reshape_and_cache
from .cache.token_inputs import token_inputs
from .collectives.all_reduce import PeerBuffers, all_gather_small, all_reduce, all_reduce_add_rms_norm
from .dispatch import TritonModule
from .experts.experts import ExpertRange, experts
from .experts.pair_sum import PairSum
from .experts.route import Routing, route
from .gated_delta.causal_conv import causal_conv
from .gated_delta.delta_rule import Gates, gated_delta_rule
from .gated_delta.gated_norm import rms_norm_gated
from .gated_delta.state import Chunks, StateCache
from .linear.heads import linear_heads
from .linear.linear import add_rms_norm_linear, linear, linear_act_mul, linear_invariant, linear_wide, prepare
from .lora.lora import AdapterSlots, TokenAdapters, add_adapters
from .norm.act_and_mul import act_and_mul
from .norm.latent_norm_rope_cache import latent_norm_rope_cache
from .norm.qk_norm_rope_cache import HeadNorms, qk_norm_rope_cache
from .norm.rms_norm import fused_add_rms_norm, rms_norm, rms_norm_add
from .norm.token_gate import token_gate
from .quantised.experts import ExpertWeight, experts_quantised
from .quantised.fp8 import (
    Fp8Rows,
    Fp8Weight,
    Rounding,
    act_and_mul_fp8,
    fused_linear_fp8_weight,
    linear_fp8,
    linear_fp8_weight,
    linear_rounding_fp8,
    rms_norm_fp8,
    to_fp8,
)
from .quantised.int4 import Int4Weight, fused_linear_int4, linear_int4
from .sampling.draw import DrawRows, gumbel_argmax, gumbel_keys, tokens_of_keys
from .sampling.logprobs import gather_logprobs
from .sampling.penalties import PenaltyRows, penalise
from .sampling.soft_cap import soft_cap_
from .sampling.truncation import CutRows, truncate_draws

_compile_ahead = TritonModule("rayllm_kernels.compile_ahead")


def compile_only() -> AbstractContextManager[None]:
    """Within, kernels that are called on CUDA tensors are compiled, side by side, and not run.

    What they would return has its shape but no content. For one thread, while no other one calls kernels.
    """
    return _compile_ahead.compile_only()
