"""MiniMax-M2, M2.1 and M2.5.

Their config.json has keys of the code that they were trained with, for things that other models of that code have.
transformers' class does not read these, so each must say what it computes.
"""

from __future__ import annotations

from typing import Any

from rayllm.config.architectures.common import check_top_k, decoder_fields, whole_number
from rayllm.config.json_fields import JsonFields
from rayllm.config.model_spec import ExpertsSpec, RouterSpec
from rayllm.errors import ModelError

# All that these keys may say, which is what an absent one stands for too.
ONLY: dict[str, Any] = {
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",  # the norms are of all heads at once
    "shared_intermediate_size": 0,  # no shared expert
    "layernorm_full_attention_beta": 1,  # factors of the residuals
    "layernorm_linear_attention_beta": 1,
    "layernorm_mlp_beta": 1,
    "swa_rope_theta": -1,  # no layers with windows
}
# Of dense MLPs, linear attention and shared experts, of which there are none.
UNUSED = ("mlp_intermediate_size", "shared_moe_mode")


def parse(config: JsonFields, _architecture: str) -> dict[str, Any]:
    rotary_dim, head_dim = config.get("rotary_dim"), config.size("head_dim", 128)
    partial = 1.0 if rotary_dim is None else config.size("rotary_dim") / head_dim
    fields = decoder_fields(config, kv_heads=8, head_dim=128, theta=5e6, partial=partial)
    inner, num_layers = config.size("intermediate_size", 1536), fields["num_layers"]
    num_experts = whole_number(config, "num_local_experts", "num_experts", default=256)
    _check_keys(config, num_layers)
    return fields | {
        "intermediate_size": inner,
        "qk_norm_whole": True,
        "draft_layers": _draft_layers(config),
        "experts": ExpertsSpec(
            num_experts=num_experts,
            top_k=check_top_k(config, config.size("num_experts_per_tok", 8), num_experts),
            intermediate_size=inner,
            sparse_layers=(True,) * num_layers,
            router=RouterSpec("sigmoid", normalised=True, correction=True),
        ),
    }


def _check_keys(config: JsonFields, num_layers: int) -> None:
    """Raises ModelError for a key that asks for something else than what is computed."""
    for key in UNUSED:
        config.get(key)
    config.only(ONLY)
    kinds = config.get("attn_type_list")
    if kinds is not None and kinds != [1] * num_layers:  # 0 is linear attention
        raise ModelError(f"{config.file}: attn_type_list must be {num_layers} times 1, not {kinds}")


def _draft_layers(config: JsonFields) -> int:
    """Of modules that guess further tokens, each a layer behind the others; published checkpoints have none of them."""
    config.flag("use_mtp", True)
    config.integer("mtp_transformer_layers", 1)
    modules = config.integer("num_mtp_modules", 0)
    if modules < 0:
        raise ModelError(f"{config.file}: num_mtp_modules must be at least 0, not {modules}")
    return modules
