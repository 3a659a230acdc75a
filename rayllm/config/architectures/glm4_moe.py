"""GLM-4-MoE: GLM-4.5 to 4.7."""

from __future__ import annotations

from typing import Any

from rayllm.config.architectures.common import check_top_k, decoder_fields, whole_number
from rayllm.config.json_fields import JsonFields
from rayllm.config.model_spec import ExpertsSpec, RouterSpec
from rayllm.errors import ModelError


def parse(config: JsonFields, _architecture: str) -> dict[str, Any]:
    fields = decoder_fields(config, kv_heads=8, norm_eps=1e-5, partial=0.5)
    num_layers, dense = fields["num_layers"], config.integer("first_k_dense_replace", 1)
    num_experts = whole_number(config, "n_routed_experts", "num_local_experts", default=128)
    inner = config.size("moe_intermediate_size", 1408)
    top_k = check_top_k(config, config.size("num_experts_per_tok", 8), num_experts)
    return fields | {
        "intermediate_size": config.size("intermediate_size", 10944),
        "qkv_bias": config.flag("attention_bias", False),
        "qk_norm": config.flag("use_qk_norm", False),
        "draft_layers": draft_layers(config),
        "experts": ExpertsSpec(
            num_experts=num_experts,
            top_k=top_k,
            intermediate_size=inner,
            sparse_layers=tuple(layer >= dense for layer in range(num_layers)),
            router=grouped_router(config, num_experts, top_k),
            shared_size=inner * config.size("n_shared_experts", 1),
        ),
    }


def grouped_router(
    config: JsonFields, num_experts: int, top_k: int, *, groups: int = 1, best: int = 1, scale: float = 1.0
) -> RouterSpec:
    """The router of DeepSeek-V3, which GLM has too. Raises ModelError if its groups do not fit the experts.

    groups, best, scale: where config.json says nothing.
    """
    groups, best = config.size("n_group", groups), config.size("topk_group", best)
    if num_experts % groups or num_experts // groups < 2:
        raise ModelError(f"{config.file}: n_group {groups} must share {num_experts} experts evenly, two or more each")
    if best > groups or best * (num_experts // groups) < top_k:
        raise ModelError(
            f"{config.file}: topk_group {best} of n_group {groups} must have num_experts_per_tok {top_k} experts"
        )
    return RouterSpec(
        "sigmoid",
        normalised=config.flag("norm_topk_prob", True),
        correction=True,
        num_groups=groups,
        top_k_groups=best,
        scale=config.number("routed_scaling_factor", scale),
        wide_logits=True,
    )


def draft_layers(config: JsonFields) -> int:
    """Layers behind the last one, for guesses of further tokens; `whole_number` would not take a 0."""
    told = {name: config.integer(name, 1) for name in ("num_nextn_predict_layers", "num_mtp_layers")}
    return max(told.values())
