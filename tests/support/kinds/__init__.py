"""Tiny configs of each family, for `model_factory`: kind -> (prefix of transformers' classes, fields of the config)."""

from __future__ import annotations

from support.kinds import (
    bloom,
    deepseek,
    gemma,
    gemma4,
    glm4,
    glm4_moe,
    gpt_oss,
    granite,
    llama,
    minimax_m2,
    ministral,
    mixtral,
    opt,
    phi3,
    qwen2_moe,
    qwen3_5,
    qwen3_moe,
    smollm3,
    vision,
)

CONFIGS = {
    **llama.CONFIGS,
    **opt.CONFIGS,
    **bloom.CONFIGS,
    **phi3.CONFIGS,
    **glm4.CONFIGS,
    **ministral.CONFIGS,
    **granite.CONFIGS,
    **smollm3.CONFIGS,
    **gemma.CONFIGS,
    **gemma4.CONFIGS,
    **vision.CONFIGS,
    **qwen2_moe.CONFIGS,
    **qwen3_moe.CONFIGS,
    **qwen3_5.CONFIGS,
    **mixtral.CONFIGS,
    **glm4_moe.CONFIGS,
    **minimax_m2.CONFIGS,
    **deepseek.CONFIGS,
    **gpt_oss.CONFIGS,
}
