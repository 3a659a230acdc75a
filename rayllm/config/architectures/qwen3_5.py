"""Qwen3.5 and Qwen3.6, dense and of experts, and Qwen3-Next: layers with a recurrent state beside full attention."""

from __future__ import annotations

from typing import Any

from rayllm.config.architectures.common import FULL, LINEAR, check_top_k, decoder_fields, layer_kinds, whole_number
from rayllm.config.architectures.qwen3_moe import sparse_layers
from rayllm.config.json_fields import JsonFields
from rayllm.config.model_spec import ExpertsSpec, GatedDeltaSpec, RouterSpec
from rayllm.errors import ModelError

# What transformers' classes compute anyway, whatever these keys say; other code may not.
FIXED = {"attn_output_gate": True, "mamba_ssm_dtype": "float32"}
DRAFTS = ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")  # of layers that guess, which are left out


def parse(config: JsonFields, _architecture: str) -> dict[str, Any]:
    return _shared(config, kv_heads=4) | {"intermediate_size": config.size("intermediate_size", 12288)}


def parse_moe(config: JsonFields, _architecture: str) -> dict[str, Any]:
    fields = _shared(config, kv_heads=2, fixed=FIXED | {"norm_topk_prob": True})
    config.get("intermediate_size")  # of nothing: all layers have experts
    num_experts = whole_number(config, "num_experts", "num_local_experts", default=256)
    top_k = check_top_k(config, config.size("num_experts_per_tok", 8), num_experts)
    sparse = (True,) * fields["num_layers"]
    experts = _experts(config, num_experts, top_k, sparse, normalised=True)
    return fields | {"experts": experts, "intermediate_size": experts.intermediate_size}


def parse_next(config: JsonFields, _architecture: str) -> dict[str, Any]:
    fields = _shared(config, kv_heads=2, grouped=True)
    num_experts = whole_number(config, "num_experts", "num_local_experts", default=512)
    top_k = check_top_k(config, config.size("num_experts_per_tok", 10), num_experts)
    sparse = sparse_layers(config, fields["num_layers"])
    experts = _experts(config, num_experts, top_k, sparse, normalised=config.flag("norm_topk_prob", True))
    return fields | {"experts": experts, "intermediate_size": config.size("intermediate_size", 5632)}


def _shared(
    config: JsonFields, *, kv_heads: int, fixed: dict[str, Any] = FIXED, grouped: bool = False
) -> dict[str, Any]:
    """What all three read alike. kv_heads: the default of transformers' class."""
    config.only(fixed)
    for key in DRAFTS:
        config.get(key)
    fields = decoder_fields(config, kv_heads=kv_heads, head_dim=256, partial=0.25, has_sections=True)
    config.one_of("hidden_act", fields["hidden_act"], ("silu", "swish"))  # the convolution's activation too
    bias = config.flag("attention_bias", False)
    return fields | {
        "qkv_bias": bias,
        "attention_out_bias": bias,
        "qk_norm": True,
        "norm_offset": True,
        "attention_gate": True,
        "draft_prefix": "mtp.",
        "gated_delta": _gated_delta(config, fields["num_layers"], grouped),
    }


def _gated_delta(config: JsonFields, num_layers: int, grouped: bool) -> GatedDeltaSpec:
    key_heads, value_heads = config.size("linear_num_key_heads", 16), config.size("linear_num_value_heads", 32)
    if value_heads % key_heads:
        raise ModelError(
            f"{config.file}: linear_num_key_heads {key_heads} does not divide linear_num_value_heads {value_heads}"
        )
    width = config.size("linear_conv_kernel_dim", 4)
    if width < 2:
        raise ModelError(f"{config.file}: linear_conv_kernel_dim must be at least 2, not {width}")
    return GatedDeltaSpec(
        layers=_linear_layers(config, num_layers),
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=config.size("linear_key_head_dim", 128),
        value_dim=config.size("linear_value_head_dim", 128),
        conv_width=width,
        grouped=grouped,
    )


def _linear_layers(config: JsonFields, num_layers: int) -> tuple[bool, ...]:
    """By layer_types, or all but every full_attention_interval-th."""
    interval = config.size("full_attention_interval", 4)
    default = [LINEAR if (layer + 1) % interval else FULL for layer in range(num_layers)]
    linear = tuple(kind == LINEAR for kind in layer_kinds(config, num_layers, (FULL, LINEAR), default))
    if all(linear):
        raise ModelError(f"{config.file}: layer_types (by full_attention_interval) must have a layer of {FULL}")
    return linear


def _experts(
    config: JsonFields, num_experts: int, top_k: int, sparse: tuple[bool, ...], *, normalised: bool
) -> ExpertsSpec:
    return ExpertsSpec(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=config.size("moe_intermediate_size", 512),
        sparse_layers=sparse,
        router=RouterSpec("softmax", normalised=normalised, wide_weights=False),
        shared_size=config.size("shared_expert_intermediate_size", 512),
        shared_gate=True,
    )
