"""Models with latent attention: DeepSeek-V2 and V3, GLM-4-MoE-Lite and Mistral 4."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rayllm.config.architectures.common import MAX_HEAD_DIM, check_top_k, decoder_fields, layer_kinds, whole_number
from rayllm.config.architectures.glm4_moe import draft_layers, grouped_router
from rayllm.config.json_fields import JsonFields
from rayllm.config.model_spec import ExpertsSpec, LatentSpec, RouterSpec
from rayllm.errors import ModelError

MAX_ROPE_DIM = 128  # of the attention kernels
# What transformers' class of Mistral 4 has where config.json says nothing.
MISTRAL4_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def parse_v3(config: JsonFields, _architecture: str) -> dict[str, Any]:
    config.one_of("scoring_func", config.text("scoring_func", "sigmoid"), ("sigmoid",))
    config.one_of("topk_method", config.text("topk_method", "noaux_tc"), ("noaux_tc",))
    fields = _latent_fields(config, kv_heads=128, q_rank=1536, interleaved=config.flag("rope_interleave", True))
    num_experts, top_k = _experts(config, "num_local_experts", experts=256, top_k=8)
    router = grouped_router(config, num_experts, top_k, groups=8, best=4, scale=2.5)
    inner, dense = config.size("moe_intermediate_size", 2048), config.integer("first_k_dense_replace", 3)
    return fields | {
        "intermediate_size": config.size("intermediate_size", 18432),
        "draft_layers": draft_layers(config),
        "experts": ExpertsSpec(
            num_experts=num_experts,
            top_k=top_k,
            intermediate_size=inner,
            sparse_layers=tuple(layer >= dense for layer in range(fields["num_layers"])),
            router=router,
            shared_size=inner * config.size("n_shared_experts", 1),
        ),
    }


def parse_v2(config: JsonFields, _architecture: str) -> dict[str, Any]:
    config.one_of("scoring_func", config.text("scoring_func", "softmax"), ("softmax",))
    if config.flag("norm_topk_prob", False):  # which transformers reads past, and other code does not
        raise ModelError(f"{config.file}: norm_topk_prob true is not supported; supported is false")
    fields = _latent_fields(config, kv_heads=None, q_rank=1536, interleaved=True)
    num_experts, top_k = _experts(config, "num_experts", experts=64, top_k=None)
    inner, dense = config.size("moe_intermediate_size", 1407), config.integer("first_k_dense_replace", 0)
    return fields | {
        "intermediate_size": config.size("intermediate_size", 11008),
        "mlp_bias": config.flag("mlp_bias", False),
        "experts": ExpertsSpec(
            num_experts=num_experts,
            top_k=top_k,
            intermediate_size=inner,
            sparse_layers=tuple(layer >= dense for layer in range(fields["num_layers"])),
            router=_v2_router(config, num_experts, top_k),
            shared_size=inner * config.size("n_shared_experts", 2),
        ),
    }


def parse_glm4_moe_lite(config: JsonFields, _architecture: str) -> dict[str, Any]:
    config.one_of("topk_method", config.text("topk_method", "noaux_tc"), ("noaux_tc",))
    fields = _latent_fields(
        config,
        kv_heads=20,
        q_rank=768,
        nope_dim=192,
        value_dim=256,
        norm_eps=1e-5,
        interleaved=config.flag("rope_interleave", True),
    )
    num_experts, top_k = _experts(config, "num_local_experts", experts=64, top_k=4)
    inner = config.size("moe_intermediate_size", 1536)
    return fields | {
        "intermediate_size": config.size("intermediate_size", 10240),
        "draft_layers": draft_layers(config),
        "experts": ExpertsSpec(
            num_experts=num_experts,
            top_k=top_k,
            intermediate_size=inner,
            sparse_layers=_lite_sparse_layers(config, fields["num_layers"]),
            router=grouped_router(config, num_experts, top_k, scale=1.8),
            shared_size=inner * config.size("n_shared_experts", 1),
        ),
    }


def parse_mistral4(config: JsonFields, _architecture: str) -> dict[str, Any]:
    fields = _latent_fields(
        config,
        kv_heads=32,
        q_rank=1024,
        kv_rank=256,
        nope_dim=64,
        whole_heads=True,
        interleaved=config.flag("rope_interleave", True),
        kinds={"yarn": "yarn"},
        scales_queries=True,
        absent=MISTRAL4_ROPE,
    )
    num_experts, top_k = _experts(config, "num_local_experts", experts=128, top_k=4)
    router = grouped_router(config, num_experts, top_k)
    inner, dense = config.size("moe_intermediate_size", 2048), config.integer("first_k_dense_replace", 0)
    return fields | {
        "intermediate_size": config.size("intermediate_size", 12288),
        "experts": ExpertsSpec(
            num_experts=num_experts,
            top_k=top_k,
            intermediate_size=inner,
            sparse_layers=tuple(layer >= dense for layer in range(fields["num_layers"])),
            router=replace(router, scores="softmax", correction=False, wide_logits=False, wide_weights=False),
            shared_size=inner * config.size("n_shared_experts", 1),
        ),
    }


def _latent_fields(
    config: JsonFields,
    *,
    kv_heads: int | None,
    q_rank: int,
    kv_rank: int = 512,
    nope_dim: int = 128,
    value_dim: int = 128,
    norm_eps: float = 1e-6,
    whole_heads: bool = False,
    **rope: Any,
) -> dict[str, Any]:
    """The fields of `ModelSpec` that all of them read alike, with the defaults of transformers' class.

    whole_heads: "head_dim" is that of whole queries, of which partial_rotary_factor is rotated, and not what is rotated
    of them. rope: options of `parse_rope`.
    """
    latent = LatentSpec(
        q_rank=None if config.is_null("q_lora_rank") else config.size("q_lora_rank", q_rank),
        kv_rank=config.size("kv_lora_rank", kv_rank),
        nope_dim=config.size("qk_nope_head_dim", nope_dim),
        rope_dim=config.size("qk_rope_head_dim", 64),
        value_dim=config.size("v_head_dim", value_dim),
    )
    for key, value, limit in (
        ("kv_lora_rank", latent.kv_rank, MAX_HEAD_DIM),
        ("qk_rope_head_dim", latent.rope_dim, MAX_ROPE_DIM),
    ):
        if value > limit:
            raise ModelError(f"{config.file}: {key} {value} is more than the {limit} that attention supports")
    if latent.rope_dim % 2:
        raise ModelError(f"{config.file}: qk_rope_head_dim must be even, not {latent.rope_dim}")
    head_dim = latent.query_dim if whole_heads else latent.rope_dim
    # transformers' class knows its default in rope_parameters alone.
    partial = (1.0 if config.get("rope_scaling") else latent.rope_dim / head_dim) if whole_heads else None
    fields = decoder_fields(config, kv_heads=kv_heads, head_dim=head_dim, norm_eps=norm_eps, partial=partial, **rope)
    whole = "qk_nope_head_dim and qk_rope_head_dim together"
    for key, told, value, other in (
        ("head_dim", fields["head_dim"], head_dim, whole if whole_heads else "qk_rope_head_dim"),
        ("qk_head_dim", config.size("qk_head_dim", latent.query_dim), latent.query_dim, whole),
        ("num_key_value_heads", fields["num_kv_heads"], fields["num_heads"], "num_attention_heads"),
    ):
        if told != value:
            raise ModelError(f"{config.file}: {key} {told} must be {other}, {value}")
    if fields["rope"].rotary_dim != latent.rope_dim:
        raise ModelError(
            f"{config.file}: partial_rotary_factor of head_dim is {fields['rope'].rotary_dim} entries, but must be "
            f"qk_rope_head_dim, {latent.rope_dim}"
        )
    if config.size("moe_layer_freq", 1) != 1:
        raise ModelError(
            f"{config.file}: moe_layer_freq {config.size('moe_layer_freq')} is not supported; supported is 1"
        )
    bias = config.flag("attention_bias", False)
    if bias and latent.q_rank is None:
        raise ModelError(f"{config.file}: attention_bias true is not supported without a q_lora_rank")
    return fields | {
        "latent": latent,
        "num_kv_heads": 1,
        "head_dim": latent.row_dim,
        "attention_scale": latent.query_dim**-0.5 * fields["rope"].score_factor,
        "qkv_bias": bias,
        "attention_out_bias": bias,
    }


def _experts(config: JsonFields, other_name: str, *, experts: int, top_k: int | None) -> tuple[int, int]:
    """Their number, which has two names, and how many of them a token goes through."""
    num_experts = whole_number(config, "n_routed_experts", other_name, default=experts)
    return num_experts, check_top_k(config, config.size("num_experts_per_tok", top_k), num_experts)


def _v2_router(config: JsonFields, num_experts: int, top_k: int) -> RouterSpec:
    method = config.text("topk_method", "greedy")
    config.one_of("topk_method", method, ("greedy", "group_limited_greedy"))
    scale = config.number("routed_scaling_factor", 1.0)
    plain = RouterSpec("softmax", scale=scale, wide_logits=True)
    if method == "greedy":  # whatever the groups are
        config.read.update(("n_group", "topk_group"))
        return plain
    config.size("n_group")
    config.size("topk_group")
    grouped = grouped_router(config, num_experts, top_k)
    groups = grouped.num_groups, grouped.top_k_groups
    return replace(plain, num_groups=groups[0], top_k_groups=groups[1], best_of_group=1)


def _lite_sparse_layers(config: JsonFields, num_layers: int) -> tuple[bool, ...]:
    default = ["dense"] + ["sparse"] * (num_layers - 1)
    kinds = layer_kinds(config, num_layers, ("dense", "sparse"), default, "mlp_layer_types")
    sparse = tuple(kind == "sparse" for kind in kinds)
    dense = config.get("first_k_dense_replace")
    if dense is not None and tuple(layer >= dense for layer in range(num_layers)) != sparse:
        raise ModelError(f"{config.file}: first_k_dense_replace {dense} and mlp_layer_types differ")
    return sparse
