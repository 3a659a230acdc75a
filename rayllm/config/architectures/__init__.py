"""Which architectures there are, by the names of transformers' classes, and how their config.json is read."""

from __future__ import annotations

from rayllm.config.architectures import (
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
    mistral3,
    mixtral,
    opt,
    phi3,
    qwen2_moe,
    qwen3_5,
    qwen3_moe,
    qwen_vl,
    smollm3,
)
from rayllm.config.architectures.architecture import Architecture, packaged, packaged_names
from rayllm.errors import ModelError

__all__ = ["ARCHITECTURES", "Architecture", "find_architecture"]

ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture(
        llama.parse, "llama", eos_token_id=2, models="Llama 2, 3.x and the many models of their shape"
    ),
    "MistralForCausalLM": Architecture(
        llama.parse, "mistral", eos_token_id=2, models="Mistral 7B, Mistral Nemo, Mistral Small 2"
    ),
    "Qwen2ForCausalLM": Architecture(llama.parse, "qwen2", models="Qwen2, Qwen2.5, QwQ"),
    "Qwen3ForCausalLM": Architecture(llama.parse, "qwen3", models="Qwen3"),
    "OPTForCausalLM": Architecture(opt.parse, "opt", eos_token_id=2, models="OPT"),
    "BloomForCausalLM": Architecture(bloom.parse, "bloom", eos_token_id=2, models="BLOOM, BLOOMZ"),
    "Phi3ForCausalLM": Architecture(phi3.parse, "phi3", eos_token_id=32000, models="Phi-3, Phi-3.5, Phi-4, Phi-4-mini"),
    "GlmForCausalLM": Architecture(
        glm4.parse, "glm", eos_token_id=[151329, 151336, 151338], models="GLM-4 9B of 2024, GLM-Edge"
    ),
    "Glm4ForCausalLM": Architecture(
        glm4.parse, "glm4", eos_token_id=[151329, 151336, 151338], models="GLM-4 and GLM-Z1 of 2025"
    ),
    "MinistralForCausalLM": Architecture(llama.parse, "ministral", eos_token_id=2, models="Ministral 8B of 2024"),
    "Ministral3ForCausalLM": Architecture(ministral.parse, "ministral3", eos_token_id=2, models="Ministral 3"),
    "GraniteForCausalLM": Architecture(granite.parse, "granite", eos_token_id=2, models="Granite 3"),
    "SmolLM3ForCausalLM": Architecture(smollm3.parse, "smollm3", eos_token_id=128001, models="SmolLM3"),
    "Gemma2ForCausalLM": Architecture(gemma.parse_gemma2, "gemma2", eos_token_id=1, models="Gemma 2"),
    "Gemma3ForCausalLM": Architecture(gemma.parse_gemma3, "gemma3_text", eos_token_id=1, models="Gemma 3 1B and 270M"),
    "Gemma3ForConditionalGeneration": Architecture(
        gemma.parse_gemma3, "gemma3", eos_token_id=1, text_types=("gemma3_text",), models="Gemma 3 4B, 12B and 27B"
    ),
    "Gemma4ForCausalLM": Architecture(
        gemma4.parse, "gemma4_text", eos_token_id=1, models="Gemma 4, the text model alone"
    ),
    "Gemma4ForConditionalGeneration": Architecture(
        gemma4.parse, "gemma4", eos_token_id=1, text_types=("gemma4_text",), models="Gemma 4 E2B, E4B, 26B-A4B and 31B"
    ),
    "Gemma4UnifiedForCausalLM": Architecture(
        gemma4.parse_unified, "gemma4_unified_text", eos_token_id=1, models="Gemma 4 12B, the text model alone"
    ),
    "Gemma4UnifiedForConditionalGeneration": Architecture(
        gemma4.parse_unified,
        "gemma4_unified",
        eos_token_id=1,
        text_types=("gemma4_unified_text",),
        models="Gemma 4 12B",
    ),
    "Mistral3ForConditionalGeneration": Architecture(
        mistral3.parse,
        "mistral3",
        eos_token_id=2,
        text_types=("mistral", "ministral3", "mistral4"),
        models="Mistral Small 3.1, 3.2 and 4, Ministral 3",
    ),
    "Qwen2_5_VLForConditionalGeneration": Architecture(
        qwen_vl.parse, "qwen2_5_vl", eos_token_id=151645, text_types=("qwen2_5_vl_text",), models="Qwen2.5-VL"
    ),
    "Qwen3VLForConditionalGeneration": Architecture(
        qwen_vl.parse, "qwen3_vl", text_types=("qwen3_vl_text",), models="Qwen3-VL"
    ),
    "Qwen2MoeForCausalLM": Architecture(qwen2_moe.parse, "qwen2_moe", models="Qwen1.5-MoE, Qwen2 57B-A14B"),
    "Qwen3MoeForCausalLM": Architecture(
        qwen3_moe.parse, "qwen3_moe", models="Qwen3 30B-A3B and 235B-A22B, Qwen3-Coder"
    ),
    "Qwen3_5ForCausalLM": Architecture(qwen3_5.parse, "qwen3_5_text", models="Qwen3.5 and Qwen3.6, text alone"),
    "Qwen3_5ForConditionalGeneration": Architecture(
        qwen3_5.parse, "qwen3_5", text_types=("qwen3_5_text",), models="Qwen3.5 and Qwen3.6, dense"
    ),
    "Qwen3_5MoeForCausalLM": Architecture(
        qwen3_5.parse_moe, "qwen3_5_moe_text", models="Qwen3.5 and Qwen3.6 of experts, text alone"
    ),
    "Qwen3_5MoeForConditionalGeneration": Architecture(
        qwen3_5.parse_moe, "qwen3_5_moe", text_types=("qwen3_5_moe_text",), models="Qwen3.5 and Qwen3.6 of experts"
    ),
    "Qwen3NextForCausalLM": Architecture(qwen3_5.parse_next, "qwen3_next", models="Qwen3-Next 80B-A3B"),
    "MixtralForCausalLM": Architecture(mixtral.parse, "mixtral", eos_token_id=2, models="Mixtral 8x7B and 8x22B"),
    "Glm4MoeForCausalLM": Architecture(glm4_moe.parse, "glm4_moe", models="GLM-4.5, GLM-4.5-Air, GLM-4.6, GLM-4.7"),
    "MiniMaxM2ForCausalLM": Architecture(
        minimax_m2.parse, "minimax_m2", eos_token_id=200020, models="MiniMax-M2, M2.1, M2.5"
    ),
    "DeepseekV3ForCausalLM": Architecture(
        deepseek.parse_v3, "deepseek_v3", eos_token_id=1, models="DeepSeek-V3, DeepSeek-V3.1, DeepSeek-R1"
    ),
    "DeepseekV2ForCausalLM": Architecture(
        deepseek.parse_v2, "deepseek_v2", eos_token_id=2, models="DeepSeek-V2, DeepSeek-V2-Lite, DeepSeek-Coder-V2"
    ),
    "Glm4MoeLiteForCausalLM": Architecture(
        deepseek.parse_glm4_moe_lite, "glm4_moe_lite", eos_token_id=1, models="GLM-4.7-Flash"
    ),
    "Mistral4ForCausalLM": Architecture(
        deepseek.parse_mistral4, "mistral4", eos_token_id=2, models="Mistral 4 without a tower for images"
    ),
    "GptOssForCausalLM": Architecture(gpt_oss.parse, "gpt_oss", models="gpt-oss 20B and 120B"),
}


def find_architecture(name: str) -> Architecture:
    """One of ARCHITECTURES, or that of a user's package. Raises ModelError if there is none of this name."""
    found = ARCHITECTURES.get(name) or packaged(name)
    if found is None:
        names = ", ".join([*ARCHITECTURES, *packaged_names()])
        raise ModelError(f"architectures: {name} is not supported; supported are {names}")
    return found
