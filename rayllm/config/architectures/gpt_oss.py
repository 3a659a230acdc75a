"""gpt-oss, with weights in bf16 or float32."""

from __future__ import annotations

from typing import Any

from rayllm.config.architectures.common import check_top_k, decoder_fields, whole_number, windows_of
from rayllm.config.json_fields import JsonFields
from rayllm.config.model_spec import ExpertsSpec, RouterSpec
from rayllm.errors import ModelError

YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def parse(config: JsonFields, _architecture: str) -> dict[str, Any]:
    fields = decoder_fields(config, kv_heads=8, head_dim=64, norm_eps=1e-5, theta=150000.0, absent=YARN)
    config.one_of("hidden_act", fields["hidden_act"], ("silu",))  # of which the experts have a form of their own
    inner, num_layers = config.size("intermediate_size", 2880), fields["num_layers"]
    num_experts = whole_number(config, "num_local_experts", "num_experts", default=128)
    top_k = check_top_k(config, config.size("num_experts_per_tok", 4), num_experts)
    attention_bias = config.flag("attention_bias", True)
    # What OpenAI's own code reads says the same once more.
    for name, value in (("experts_per_token", top_k), ("initial_context_length", fields["rope"].original_max_position)):
        if config.size(name, value) != value:
            raise ModelError(f"{config.file}: {name} must be {value}, as other keys say")
    return fields | {
        "intermediate_size": inner,
        "qkv_bias": attention_bias,
        "attention_out_bias": attention_bias,
        "attention_sinks": True,
        "sliding_windows": _sliding_windows(config, num_layers),
        "experts": ExpertsSpec(
            num_experts=num_experts,
            top_k=top_k,
            intermediate_size=inner,
            sparse_layers=(True,) * num_layers,
            router=RouterSpec("top_k_softmax", bias=True, wide_weights=False),
            bias=True,
            clamp=(config.number("swiglu_alpha", 1.702), config.number("swiglu_limit", 7.0)),
        ),
    }


def _sliding_windows(config: JsonFields, num_layers: int) -> tuple[int | None, ...]:
    window = config.size("sliding_window", 128)
    if config.is_null("sliding_window"):
        raise ModelError(f"{config.file}: sliding_window must be a positive integer, not null")
    return windows_of(config, num_layers, window, [layer % 2 == 0 for layer in range(num_layers)])
