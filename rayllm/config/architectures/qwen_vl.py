"""The text models of Qwen2.5-VL and Qwen3-VL, whose checkpoints see images.

A text token's three positions, of time, height and width, are one number, so that the sections into which the rotary
embedding is cut for them (mrope) change nothing.
"""

from __future__ import annotations

from typing import Any

from rayllm.config.architectures.common import decoder_fields, split_hidden
from rayllm.config.architectures.llama import layer_windows
from rayllm.config.json_fields import JsonFields
from rayllm.config.rope import ROPE_KINDS
from rayllm.errors import ModelError

KINDS = ROPE_KINDS | {"mrope": "default"}  # of Qwen2.5-VL


def parse(config: JsonFields, architecture: str) -> dict[str, Any]:
    own: dict[str, Any]
    if architecture == "Qwen3VLForConditionalGeneration":
        fields = decoder_fields(config, kv_heads=32, head_dim=128, theta=500000.0, has_sections=True)
        bias = config.flag("attention_bias", False)
        own = {"qkv_bias": bias, "attention_out_bias": bias, "qk_norm": True}
    else:
        fields = decoder_fields(config, kv_heads=8, norm_eps=1e-5, theta=1000000.0, kinds=KINDS, has_sections=True)
        _check_heads(config, fields)
        own = {"qkv_bias": True, "sliding_windows": layer_windows(config, fields["num_layers"], first=80)}
    return fields | own | {"intermediate_size": config.size("intermediate_size")}


def _check_heads(config: JsonFields, fields: dict[str, Any]) -> None:
    """Raises ModelError for heads and sections of which transformers' Qwen2.5-VL makes something else, or nothing."""
    share = split_hidden(config, fields["hidden_size"], fields["num_heads"])
    if fields["head_dim"] != share:
        raise ModelError(f"{config.file}: head_dim must be hidden_size / num_attention_heads, {share}")
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    sections = rope.get("mrope_section")
    fits = isinstance(sections, list) and all(type(each) is int for each in sections) and sum(sections) == share // 2
    if not fits:
        raise ModelError(
            f"{config.file}: rope_parameters.mrope_section must be numbers of which the sum is {share // 2}, half of "
            f"hidden_size / num_attention_heads, not {sections}"
        )
