"""Tiny configs of each family, for `model_factory`: kind -> (prefix of transformers' classes, fields of the config)."""

from __future__ import annotations

from support.kinds import bloom, llama, mixtral, opt, qwen3_moe

CONFIGS = {**llama.CONFIGS, **opt.CONFIGS, **bloom.CONFIGS, **qwen3_moe.CONFIGS, **mixtral.CONFIGS}
