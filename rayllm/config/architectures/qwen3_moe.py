"""Qwen3-MoE."""

from __future__ import annotations

from typing import Any

from rayllm.config.architectures.common import check_top_k, decoder_fields, whole_number
from rayllm.config.json_fields import JsonFields
from rayllm.config.model_spec import ExpertsSpec, RouterSpec
from rayllm.errors import ModelError

FIXED = {"use_qk_norm": True, "shared_expert_intermediate_size": 0}  # as Qwen3-Coder's config.json has them


def parse(config: JsonFields, _architecture: str) -> dict[str, Any]:
    config.only(FIXED)
    fields = decoder_fields(config, kv_heads=4)
    attention_bias = config.flag("attention_bias", False)
    num_experts = whole_number(config, "num_experts", "num_local_experts", default=128)
    return fields | {
        "intermediate_size": config.size("intermediate_size", 6144),
        "qkv_bias": attention_bias,
        "attention_out_bias": attention_bias,
        "qk_norm": True,
        "sliding_windows": (_window(config),) * fields["num_layers"],
        "experts": ExpertsSpec(
            num_experts=num_experts,
            top_k=check_top_k(config, config.size("num_experts_per_tok", 8), num_experts),
            intermediate_size=config.size("moe_intermediate_size", 768),
            sparse_layers=sparse_layers(config, fields["num_layers"]),
            router=RouterSpec("softmax", normalised=config.flag("norm_topk_prob", False), wide_weights=False),
        ),
    }


def sparse_layers(config: JsonFields, num_layers: int) -> tuple[bool, ...]:
    """Every decoder_sparse_step-th layer has experts, unless mlp_only_layers names it."""
    step, dense = config.size("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise ModelError(f"{config.file}: mlp_only_layers must be a list of integers, not {dense!r}")
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers))


def _window(config: JsonFields) -> int | None:
    """Of all layers. max_window_layers means nothing without one, and transformers does not know it with one."""
    if config.flag("use_sliding_window", False):
        return None if config.is_null("sliding_window") else config.size("sliding_window", 4096)
    for unused in ("sliding_window", "max_window_layers"):
        config.get(unused)
    return None
