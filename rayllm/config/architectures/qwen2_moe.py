"""Qwen2-MoE."""

from __future__ import annotations

from typing import Any

from rayllm.config.architectures.common import check_top_k, decoder_fields, windows_of
from rayllm.config.architectures.qwen3_moe import sparse_layers
from rayllm.config.json_fields import JsonFields
from rayllm.config.model_spec import ExpertsSpec, RouterSpec
from rayllm.errors import ModelError


def parse(config: JsonFields, _architecture: str) -> dict[str, Any]:
    fields = decoder_fields(config, kv_heads=16)
    num_experts = config.size("num_experts", 60)
    return fields | {
        "intermediate_size": config.size("intermediate_size", 5632),
        "qkv_bias": config.flag("qkv_bias", True),
        "sliding_windows": _sliding_windows(config, fields["num_layers"]),
        "experts": ExpertsSpec(
            num_experts=num_experts,
            top_k=check_top_k(config, config.size("num_experts_per_tok", 4), num_experts),
            intermediate_size=config.size("moe_intermediate_size", 1408),
            sparse_layers=sparse_layers(config, fields["num_layers"]),
            router=RouterSpec("softmax", normalised=config.flag("norm_topk_prob", False), wide_weights=False),
            shared_size=config.size("shared_expert_intermediate_size", 5632),
            shared_gate=True,
        ),
    }


def _sliding_windows(config: JsonFields, num_layers: int) -> tuple[int | None, ...]:
    """Of the layers that layer_types says, or of every other one below max_window_layers, where other Qwens have them
    from that layer on."""
    window, last = None, config.integer("max_window_layers", 28)
    if config.flag("use_sliding_window", False):
        told = config.get("sliding_window", 4096)
        if not told:  # transformers writes 0 where it is not used, and fails for null
            raise ModelError(f"{config.file}: use_sliding_window needs a positive sliding_window, not {told}")
        window = config.size("sliding_window", 4096)
    config.get("sliding_window")  # which means nothing where it is not used
    return windows_of(config, num_layers, window, [layer < last and layer % 2 == 0 for layer in range(num_layers)])
