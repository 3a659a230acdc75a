"""MiniMax-M2, with the keys that the published config.json has beside those of transformers' class."""

from __future__ import annotations

from support.kinds.common import LLAMA

PUBLISHED = {
    "mlp_intermediate_size": 8192,
    "mtp_transformer_layers": 1,
    "num_mtp_modules": 3,
    "qk_norm_type": "per_layer",
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "shared_moe_mode": "sigmoid",
    "use_mtp": True,
    "use_qk_norm": True,
    "use_routing_bias": True,
}
SIZES = LLAMA | {"intermediate_size": 48, "num_local_experts": 8, "num_experts_per_tok": 3, "rotary_dim": 8}
CONFIGS = {"minimax_m2": ("MiniMaxM2", SIZES | PUBLISHED)}
