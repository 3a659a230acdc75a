"""Scales of an fp8 KV cache that a checkpoint brings along."""

from __future__ import annotations

import torch

from rayllm.errors import ModelError
from rayllm.layers.weights import WeightSource
from rayllm.parallel.tp_group import TPGroup
from rayllm_kernels.ops import KVScales

# Where quantisation tools put the scale of keys, in the attention of a layer: that of a tensor, or of its projection.
K_NAMES = ("k_scale", "attn.k_scale", "k_proj.k_scale")


def load_kv_scales(source: WeightSource, prefix: str, num_kv_heads: int, tp: TPGroup) -> KVScales | None:
    """The scales of the rank's KV heads in an attention layer, on the CPU; None if the checkpoint has none.

    prefix: of the layer's names. num_kv_heads: of the whole model. A stored scale is one number for all heads, or one
    for each. Raises ModelError for any other number of them, for a scale that is not a positive number, and if only one
    of keys and values has any.
    """
    for name in K_NAMES:
        k_name, v_name = prefix + name, prefix + name.replace("k_", "v_")
        k, v = source.optional(k_name), source.optional(v_name)
        if k is None and v is None:
            continue
        if k is None or v is None:
            found, lacks = (v_name, k_name) if k is None else (k_name, v_name)
            raise ModelError(f"the checkpoint has {found}, but lacks {lacks}")
        return KVScales(_of_rank(k, k_name, num_kv_heads, tp), _of_rank(v, v_name, num_kv_heads, tp))
    return None


def _of_rank(stored: torch.Tensor, name: str, num_kv_heads: int, tp: TPGroup) -> torch.Tensor:
    if stored.numel() not in (1, num_kv_heads):
        raise ModelError(f"{name} must be one scale, or one for each of {num_kv_heads} KV heads, not {stored.numel()}")
    scales = stored.float().flatten().expand(num_kv_heads)
    if not bool((scales.isfinite() & (scales > 0)).all()):
        raise ModelError(f"{name} must be positive, not {scales.tolist()}")
    first = tp.rank * num_kv_heads // tp.size
    return scales[first : first + max(1, num_kv_heads // tp.size)].clone()
