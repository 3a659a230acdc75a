"""config.json in, ModelSpec out; each refusal is one sentence that names what is wrong."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest

from rayllm.config.architectures import ARCHITECTURES
from rayllm.config.model_folder import load_model_spec, load_sampling_defaults
from rayllm.config.model_spec import check_parallel
from rayllm.errors import ModelError

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 160,
    "vocab_size": 259,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
OPT = {
    "architectures": ["OPTForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "ffn_dim": 128,
    "vocab_size": 259,
    "max_position_embeddings": 512,
}


def write(folder, config, generation=None):
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return str(folder)


def spec_of(folder, base=LLAMA, generation=None, **fields):
    config = {key: value for key, value in (base | fields).items() if value is not ...}
    return load_model_spec(write(folder, config, generation))


def arch(name):
    return {"architectures": [name + "ForCausalLM"]}


def test_llama(tmp_path):
    spec = spec_of(tmp_path, torch_dtype="bfloat16", bos_token_id=1, eos_token_id=[2, 3])
    assert (spec.architecture, spec.num_layers, spec.num_heads, spec.num_kv_heads) == ("LlamaForCausalLM", 4, 8, 4)
    assert (spec.hidden_size, spec.head_dim, spec.intermediate_size, spec.vocab_size) == (64, 8, 160, 259)
    assert (spec.max_position_embeddings, spec.max_model_len, spec.norm_eps) == (512, 512, 1e-5)
    assert (spec.dtype, spec.hidden_act, spec.tie_word_embeddings) == ("bfloat16", "silu", False)
    assert spec.eos_token_ids == [2, 3]
    assert (spec.sliding_windows, spec.opt) == ((None,) * 4, None)
    assert not any((spec.qkv_bias, spec.attention_out_bias, spec.mlp_bias, spec.qk_norm))
    assert spec.rope is not None
    assert (spec.rope.rope_type, spec.rope.theta, spec.rope.rotary_dim) == ("default", 10000.0, 8)


def test_defaults_of_the_classes(tmp_path):
    plain = spec_of(tmp_path, num_key_value_heads=..., rms_norm_eps=...)
    assert (plain.num_kv_heads, plain.norm_eps, plain.dtype, plain.eos_token_ids) == (8, 1e-6, "float32", [2])
    for name, kv_heads in (("Mistral", 8), ("Qwen2", 32), ("Qwen3", 32)):
        heads = {"num_attention_heads": 32, "hidden_size": 128}
        assert spec_of(tmp_path, **arch(name), **heads, num_key_value_heads=...).num_kv_heads == kv_heads
        assert spec_of(tmp_path, **arch(name), **heads, num_key_value_heads=None).num_kv_heads == 32
    assert spec_of(tmp_path, **arch("Qwen2")).eos_token_ids == []
    assert spec_of(tmp_path, **arch("Qwen3")).head_dim == 128
    assert spec_of(tmp_path, **arch("Qwen3"), head_dim=None).head_dim == 8
    assert spec_of(tmp_path, base=OPT).tie_word_embeddings


@pytest.mark.parametrize(
    ("architecture", "qkv", "out", "mlp", "norm"),
    [
        ("Llama", True, True, True, False),
        ("Mistral", False, False, False, False),
        ("Qwen2", True, False, False, False),
        ("Qwen3", True, True, False, True),
    ],
)
def test_flags(tmp_path, architecture, qkv, out, mlp, norm):
    spec = spec_of(tmp_path, **arch(architecture), attention_bias=out, mlp_bias=mlp)
    assert (spec.qkv_bias, spec.attention_out_bias, spec.mlp_bias, spec.qk_norm) == (qkv, out, mlp, norm)


def test_both_styles_of_dtype_and_rope(tmp_path):
    old = spec_of(tmp_path, torch_dtype="float16", rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0})
    new = spec_of(tmp_path, dtype="float16", rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5})
    assert old == new
    assert (old.dtype, old.max_model_len) == ("float16", 1024)


def test_rope_llama3(tmp_path):
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    spec = spec_of(tmp_path, rope_scaling=scaling | {"original_max_position_embeddings": 64})
    assert spec.rope is not None
    assert (spec.rope.factor, spec.rope.high_freq_factor, spec.rope.original_max_position) == (8.0, 4.0, 64)
    assert spec.max_model_len == 512


def test_rope_yarn(tmp_path):
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    rope = spec_of(tmp_path, rope_scaling=scaling).rope
    assert rope is not None
    assert rope.attention_factor == pytest.approx(1.138629436)
    assert (rope.beta_fast, rope.beta_slow, rope.truncate) == (32.0, 1.0, True)
    assert spec_of(tmp_path, rope_scaling=scaling).max_model_len == 1024
    ratio = spec_of(tmp_path, rope_scaling=scaling | {"factor": None}).rope
    assert ratio is not None
    assert ratio.factor == 2.0
    weighted = spec_of(tmp_path, rope_scaling=scaling | {"mscale": 2.0, "mscale_all_dim": 1.0, "truncate": False}).rope
    assert weighted is not None
    assert weighted.attention_factor == pytest.approx(1.277258872 / 1.138629436)
    assert not weighted.truncate


LONGROPE = {"type": "longrope", "short_factor": [1, 1.5, 2, 2], "long_factor": [1, 2, 4, 8]}


def test_ropes_that_depend_on_the_length(tmp_path):
    """Without a longer max_model_len, they are those of the pretraining."""
    spec = spec_of(tmp_path, rope_scaling={"type": "dynamic", "factor": 2.0})
    assert (spec.default_model_len, spec.max_model_len) == (512, 1024)
    spec = spec_of(tmp_path, rope_scaling=LONGROPE, original_max_position_embeddings=64)
    assert (spec.default_model_len, spec.max_model_len) == (64, 512)
    assert spec.rope is not None
    assert (spec.rope.short_factors, spec.rope.long_factors) == ((1.0, 1.5, 2.0, 2.0), (1.0, 2.0, 4.0, 8.0))
    assert spec.rope.attention_factor == pytest.approx((1 + math.log(8) / math.log(64)) ** 0.5)
    told = spec_of(tmp_path, rope_scaling=LONGROPE | {"attention_factor": 1.25, "factor": 32.0}).rope
    assert told is not None
    assert told.attention_factor == 1.25
    assert spec_of(tmp_path).default_model_len == 512


def test_keys_that_change_nothing(tmp_path):
    """What fine-tunes, converters and older versions leave behind."""
    plain = spec_of(tmp_path)
    left = {
        "_name_or_path": "somebody/model",
        "auto_map": {"AutoModelForCausalLM": "modeling.Own"},
        "attention_dropout": 0.1,
        "max_length": 20,
        "partial_rotary_factor": 1.0,
        "pretraining_tp": 2,
        "pruned_heads": {},
        "quantization_config": None,
        "rope_interleaved": False,
        "sliding_window": None,
        "tokenizer_class": "LlamaTokenizer",
        "transformers.js_config": {"dtype": "q4"},
        "unk_token_id": 0,
        "unsloth_version": "2024.9",
    }
    assert spec_of(tmp_path, **left) == plain
    for key, value in left.items():
        assert spec_of(tmp_path, **{key: value}) == plain


@pytest.mark.parametrize(
    ("fields", "windows", "telling"),
    [
        (arch("Mistral") | {"sliding_window": 24}, (24,) * 4, 3),
        (arch("Mistral") | {"sliding_window": None}, (None,) * 4, 3),
        (arch("Mistral"), (4096,) * 4, 3),
        (arch("Llama") | {"sliding_window": None}, (None,) * 4, 3),
        (arch("Qwen2") | {"sliding_window": 24, "max_window_layers": 2}, (None,) * 4, 3),
        (arch("Qwen3") | {"sliding_window": 24, "use_sliding_window": False}, (None,) * 4, 3),
        (
            arch("Qwen2") | {"sliding_window": 24, "use_sliding_window": True, "max_window_layers": 3},
            (None, None, None, 24),
            4,
        ),
        (
            arch("Qwen3")
            | {
                "sliding_window": 24,
                "use_sliding_window": True,
                "max_window_layers": 4,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (24, None, 24, None),
            3,
        ),
    ],
)
def test_sliding_windows(tmp_path, fields, windows, telling):
    spec = spec_of(tmp_path, **fields)
    assert spec.sliding_windows == windows
    assert spec.num_distinct_layers == telling


QWEN_VL = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "vision_config": {"depth": 1},
}
QWEN_TEXT = {key: value for key, value in LLAMA.items() if key != "architectures"} | {
    "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
    "vocab_size": 151936,
}


def test_text_models_beside_towers(tmp_path):
    """Their config.json has a text_config, or, in old files of Qwen2.5-VL, the text model's keys beside the tower's."""
    nested = QWEN_VL | {"text_config": QWEN_TEXT, "dtype": "bfloat16", "tie_word_embeddings": True}
    spec = spec_of(tmp_path, base=nested)
    assert (spec.dtype, spec.tie_word_embeddings, spec.text_only, spec.qkv_bias) == ("bfloat16", True, True, True)
    assert (spec.architecture, spec.head_dim, spec.eos_token_ids) == (QWEN_VL["architectures"][0], 8, [151645])
    assert spec.rope is not None
    assert (spec.rope.rope_type, spec.rope.theta) == ("default", 1e6)
    flat = QWEN_VL | QWEN_TEXT | {"dtype": "bfloat16", "tie_word_embeddings": True}
    assert spec_of(tmp_path, base=flat) == spec
    assert spec_of(tmp_path, base=nested | {"hidden_size": 64}) == spec
    assert not spec_of(tmp_path).text_only
    for change, message in (
        ({"hidden_size": 128}, '"hidden_size" is not understood'),
        ({"logit_scale": 0.5}, '"logit_scale" is not understood'),
        ({"text_config": QWEN_TEXT | {"logit_scale": 0.5}}, '"text_config.logit_scale" is not understood'),
        ({"text_config": None}, "text_config must be an object, not None"),
        ({"text_config": QWEN_TEXT | {"model_type": "llama"}}, "text_config.model_type llama is not supported"),
        ({"text_config": QWEN_TEXT | {"rope_scaling": {"type": "mrope"}}}, "mrope_section must be numbers"),
        (
            {"text_config": QWEN_TEXT | {"tie_word_embeddings": True}, "tie_word_embeddings": False},
            "tie_word_embeddings is true in text_config and false beside it",
        ),
    ):
        with pytest.raises(ModelError, match=message):
            spec_of(tmp_path, base=nested | change)


GEMMA = {"num_hidden_layers": 4, "hidden_size": 64, "head_dim": 8, "sliding_window": 16, "vocab_size": 259}


def test_gemma2(tmp_path):
    spec = spec_of(tmp_path, GEMMA | arch("Gemma2"), hidden_act="gelu_pytorch_tanh", sliding_window_size=16)
    assert spec.sliding_windows == (16, None, 16, None)
    assert (spec.attention_softcap, spec.logit_softcap, spec.attention_scale) == (50.0, 30.0, 256**-0.5)
    assert (spec.embedding_scale, spec.norm_offset, spec.post_norms, spec.qk_norm) == (8.0, True, True, False)
    assert (spec.tie_word_embeddings, spec.eos_token_ids, spec.window_rope) == (True, [1], None)
    caps = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    plain = spec_of(tmp_path, GEMMA | arch("Gemma2"), **caps, query_pre_attn_scalar=4)
    assert (plain.attention_softcap, plain.logit_softcap, plain.attention_scale) == (None, None, 0.5)


def test_gemma3_of_transformers_4(tmp_path):
    """As on the hub: a text_config of what is not the default, and rotary embeddings by the older keys."""
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "image_token_index": 262144,
        "mm_tokens_per_image": 256,
        "torch_dtype": "bfloat16",
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152},
    }
    spec = load_model_spec(write(tmp_path, config))
    assert spec.sliding_windows == tuple(None if layer % 6 == 5 else 1024 for layer in range(34))
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.vocab_size) == (8, 4, 256, 262208)
    assert (spec.rope.rope_type, spec.rope.theta, spec.rope.factor) == ("linear", 1e6, 8.0)
    assert (spec.window_rope.rope_type, spec.window_rope.theta) == ("default", 1e4)
    # The context that the factor leads to, not one that it stretches once more.
    assert spec.max_model_len == 131072
    assert (spec.qk_norm, spec.attention_softcap, spec.logit_softcap) == (True, None, None)
    assert (spec.eos_token_ids, spec.dtype, spec.text_only) == ([1, 106], "bfloat16", True)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("Gemma2", {"hidden_act": "gelu"}, "hidden_act gelu is not hidden_activation, gelu_pytorch_tanh"),
        ("Gemma2", {"sliding_window_size": 8}, "sliding_window_size 8 is not sliding_window, 16"),
        ("Gemma2", {"sliding_window": None}, "sliding_window must be a positive integer where layers slide"),
        ("Gemma2", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping must be a positive number"),
        ("Gemma2", {"layer_types": ["full_attention"]}, "layer_types must be a list of num_hidden_layers, 4"),
        ("Gemma3", {"attn_logit_softcapping": 50.0}, '"attn_logit_softcapping" is not understood'),
        ("Gemma3", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters must have an object for"),
        ("Gemma3", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_scaling.rope_type yarn is not"),
    ],
)
def test_refusals_of_gemma(tmp_path, name, fields, message):
    with pytest.raises(ModelError, match=message):
        spec_of(tmp_path, GEMMA | arch(name), **fields)


ROPES = {
    "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
    "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
}
GEMMA4_E2B = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_k_eq_v": False,
    "dtype": "bfloat16",
    "enable_moe_block": False,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1536,
    "hidden_size_per_layer_input": 256,
    "intermediate_size": 6144,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
    "max_position_embeddings": 131072,
    "model_type": "gemma4_text",
    "moe_intermediate_size": None,
    "num_attention_heads": 8,
    "num_experts": None,
    "num_global_key_value_heads": None,
    "num_hidden_layers": 35,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 20,
    "rms_norm_eps": 1e-06,
    "rope_parameters": ROPES,
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "top_k_experts": None,
    "use_bidirectional_attention": None,
    "use_double_wide_mlp": True,
    "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144,
}
GEMMA4_26B = GEMMA4_E2B | {
    "attention_k_eq_v": True,
    "enable_moe_block": True,
    "hidden_size": 2816,
    "hidden_size_per_layer_input": 0,
    "intermediate_size": 2112,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
    "moe_intermediate_size": 704,
    "num_attention_heads": 16,
    "num_experts": 128,
    "num_global_key_value_heads": 2,
    "num_hidden_layers": 30,
    "num_key_value_heads": 8,
    "num_kv_shared_layers": 0,
    "sliding_window": 1024,
    "top_k_experts": 8,
    "use_bidirectional_attention": "vision",
    "use_double_wide_mlp": False,
}


def test_gemma4_as_published(tmp_path):
    towers = {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "audio_config": {"model_type": "gemma4_audio"},
        "audio_token_id": 258881,
        "boa_token_id": 256000,
        "eoa_token_index": 258883,
        "image_token_id": 258880,
        "vision_config": {"model_type": "gemma4_vision"},
        "vision_soft_tokens_per_image": 280,
    }
    small = spec_of(tmp_path, towers, text_config=GEMMA4_E2B)
    assert small.kv_heads(3) == (1, 256)
    assert small.kv_heads(4) == (1, 512)
    assert [small.kv_layer(layer) for layer in (0, 13, 14, 15, 19, 34)] == [0, 13, 14, 13, 14, 14]
    assert (small.rope.rotary_dim, small.rope.turning_pairs, small.window_rope.rope_type) == (512, 64, "default")
    assert (small.gemma4.layer_embedding, small.gemma4.wide_readers, small.experts) == (256, True, None)
    assert (small.attention_scale, small.logit_softcap, small.embedding_scale) == (1.0, 30.0, 1536**0.5)
    assert small.num_distinct_layers == 20
    large = spec_of(tmp_path, towers, text_config=GEMMA4_26B)
    assert (large.kv_heads(0), large.kv_heads(5), large.kv_layers) == ((8, 256), (2, 512), None)
    assert (large.experts.num_experts, large.experts.top_k, large.experts.intermediate_size) == (128, 8, 704)
    assert (large.gemma4.key_is_value, large.gemma4.layer_embedding) == (True, 0)
    check_parallel(large, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention all is not supported"),
        ({"num_kv_shared_layers": 32}, "num_kv_shared_layers 32 must leave a layer of each of layer_types"),
        ({"global_head_dim": 1024}, "global_head_dim 1024 is more than the 512"),
        ({"vocab_size_per_layer_input": 100}, "vocab_size_per_layer_input 100 is less than vocab_size"),
        ({"rope_parameters": {"full_attention": ROPES["full_attention"]}}, "rope_parameters.sliding_attention must"),
        (
            {"rope_parameters": ROPES | {"full_attention": {"rope_type": "yarn", "rope_theta": 1.0}}},
            "rope_parameters.full_attention.rope_type yarn is not supported",
        ),
        ({"per_layer_config": {"4": {"head_dim": 512}}}, "per_layer_config must be the same for all full"),
        ({"per_layer_config": {"0": {"sliding_window": 8}}}, "per_layer_config.0.sliding_window"),
        ({"per_layer_config": {"99": {"head_dim": 8}}}, "per_layer_config.99 must be an object, and of a layer"),
        (
            {"enable_moe_block": True, "top_k_experts": 2},
            "enable_moe_block needs num_experts and moe_intermediate_size",
        ),
        (
            {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5, "moe_intermediate_size": 8},
            "top_k_experts 5 is more than the 4",
        ),
        ({"attn_logit_softcapping": 50.0}, '"attn_logit_softcapping" is not understood'),
    ],
)
def test_refusals_of_gemma4(tmp_path, change, message):
    with pytest.raises(ModelError, match=message):
        spec_of(tmp_path, GEMMA4_E2B | arch("Gemma4"), **change)


MINIMAX = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "attention_dropout": 0.0,
    "attn_type_list": [1] * 62,
    "auto_map": {"AutoConfig": "configuration_minimax_m2.MiniMaxM2Config"},
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "initializer_range": 0.02,
    "intermediate_size": 1536,
    "layernorm_full_attention_beta": 1.0,
    "layernorm_linear_attention_beta": 1.0,
    "layernorm_mlp_beta": 1.0,
    "max_position_embeddings": 196608,
    "mlp_intermediate_size": 8192,
    "model_type": "minimax_m2",
    "mtp_transformer_layers": 1,
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "num_mtp_modules": 3,
    "output_router_logits": False,
    "postnorm": False,
    "qk_norm_type": "per_layer",
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "float8_e4m3fn",
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.0,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "shared_moe_mode": "sigmoid",
    "sliding_window": None,
    "swa_rope_theta": -1.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_mtp": True,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 200064,
}


def test_minimax_m2_as_published(tmp_path):
    spec = spec_of(tmp_path, MINIMAX)
    assert (spec.num_layers, spec.draft_layers, spec.qk_norm_whole, spec.dtype) == (62, 3, True, "bfloat16")
    assert (spec.rope.rotary_dim, spec.rope.theta, spec.max_model_len) == (64, 5e6, 196608)
    assert (spec.experts.num_experts, spec.experts.top_k, spec.experts.intermediate_size) == (256, 8, 1536)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attn_type_list", [1] * 61 + [0]),
        ("layernorm_mlp_beta", 3.5),
        ("num_mtp_modules", -1),
        ("postnorm", True),
        ("qk_norm_type", "per_head"),
        ("scoring_func", "softmax"),
        ("shared_intermediate_size", 1536),
        ("sliding_window", 4096),
        ("swa_rope_theta", 10000.0),
        ("use_qk_norm", False),
        ("use_routing_bias", False),
    ],
)
def test_refusals_of_minimax_m2(tmp_path, key, value):
    with pytest.raises(ModelError, match=key):
        spec_of(tmp_path, MINIMAX, **{key: value})


def test_qwen2_moe_windows(tmp_path):
    """Every other layer of the first max_window_layers."""
    base = LLAMA | arch("Qwen2Moe") | {"sliding_window": 16}
    assert spec_of(tmp_path, base).sliding_windows == (None,) * 4
    windows = {"use_sliding_window": True}
    assert spec_of(tmp_path, base, **windows).sliding_windows == (16, None, 16, None)
    assert spec_of(tmp_path, base, **windows, max_window_layers=2).sliding_windows == (16, None, None, None)
    for window in (None, 0):
        with pytest.raises(ModelError, match=f"use_sliding_window needs a positive sliding_window, not {window}"):
            spec_of(tmp_path, base | windows | {"sliding_window": window})


def test_generation_config_wins(tmp_path):
    assert spec_of(tmp_path, eos_token_id=7, generation={"eos_token_id": [9, 7]}).eos_token_ids == [9, 7]
    assert spec_of(tmp_path, eos_token_id=7, generation={"eos_token_id": 0}).eos_token_ids == [0]
    assert spec_of(tmp_path, eos_token_id=7, generation={"temperature": 0.6}).eos_token_ids == [7]


def test_end_of_sequence_tokens_beyond_the_vocabulary_are_none(tmp_path):
    spec = spec_of(tmp_path, vocab_size=100, eos_token_id=7, generation={"eos_token_id": [100, 99, 10**6]})
    assert spec.eos_token_ids == [99]


def test_sampling_defaults(tmp_path):
    assert load_sampling_defaults(str(tmp_path)) == {}
    told = {"do_sample": True, "temperature": 0.6, "top_p": None, "top_k": 20, "min_p": 0, "max_new_tokens": 99}
    path = write(tmp_path, LLAMA, told | {"repetition_penalty": 1.05, "eos_token_id": 3})
    expected = {"temperature": 0.6, "top_k": 20, "min_p": 0, "repetition_penalty": 1.05, "max_tokens": 99}
    assert load_sampling_defaults(path) == expected
    for bad, message in (
        ({"top_p": 2}, "top_p must be greater than 0 and at most 1, not 2"),
        ({"temperature": "hot"}, "temperature must be a number, not 'hot'"),
        ({"max_new_tokens": 0}, "max_tokens must be at least 1, not 0"),
    ):
        with pytest.raises(ModelError, match=rf"generation_config.json: {message} \(generation_config none"):
            load_sampling_defaults(write(tmp_path, LLAMA, bad))


def test_opt(tmp_path):
    spec = spec_of(tmp_path, base=OPT, word_embed_proj_dim=32, enable_bias=False)
    assert spec.opt is not None
    assert (spec.opt.embed_dim, spec.opt.pre_norm, spec.opt.final_norm, spec.opt.norm_affine) == (32, True, True, True)
    assert (spec.intermediate_size, spec.hidden_act, spec.norm_eps, spec.rope) == (128, "relu", 1e-5, None)
    assert not any((spec.qkv_bias, spec.attention_out_bias, spec.mlp_bias))
    post = spec_of(tmp_path, base=OPT, do_layer_norm_before=False).opt
    assert post is not None
    assert (post.embed_dim, post.pre_norm, post.final_norm) == (64, False, False)
    old = spec_of(tmp_path, base=OPT, _remove_final_layer_norm=True).opt
    assert old is not None
    assert not old.final_norm


BLOOM = {"architectures": ["BloomForCausalLM"], "vocab_size": 259}


def test_bloom(tmp_path):
    spec = spec_of(tmp_path, base=BLOOM, n_embed=96, hidden_size=64, n_layer=3, n_head=12, eos_token_id=...)
    assert (spec.hidden_size, spec.num_layers, spec.num_heads, spec.num_kv_heads) == (96, 3, 12, 12)
    assert (spec.head_dim, spec.intermediate_size, spec.hidden_act) == (8, 384, "gelu_pytorch_tanh")
    assert (spec.max_model_len, spec.eos_token_ids, spec.tie_word_embeddings) == (2048, [2], True)
    assert (spec.rope, spec.opt) == (None, None)
    assert spec.bloom is not None
    assert not spec.bloom.residual_after_norm
    other = spec_of(
        tmp_path,
        base=BLOOM,
        hidden_size=64,
        num_hidden_layers=2,
        n_layer=5,
        num_attention_heads=4,
        n_head=2,
        seq_length=4096,
        apply_residual_connection_post_layernorm=True,
    )
    assert (other.hidden_size, other.num_layers, other.num_heads, other.max_model_len) == (64, 2, 4, 4096)
    assert other.bloom is not None
    assert other.bloom.residual_after_norm
    with pytest.raises(ModelError, match="num_attention_heads 7 does not divide hidden_size 64"):
        spec_of(tmp_path, base=BLOOM, hidden_size=64, n_head=7)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, r"GPT2LMHeadModel is not supported.*LlamaForCausalLM.*OPT"),
        ({"architectures": ...}, 'config.json has no "architectures"'),
        ({"hidden_size": ...}, 'config.json has no "hidden_size"'),
        ({"vocab_size": None}, 'config.json has no "vocab_size"'),
        ({"num_hidden_layers": "4"}, "num_hidden_layers must be a positive integer, not '4'"),
        ({"num_hidden_layers": 10**30}, "num_hidden_layers must be at most 4096, not 1000000"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, not 0"),
        ({"rms_norm_eps": -1}, "rms_norm_eps must be a positive number"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false"),
        ({"quantization_config": {"quant_method": "vptq"}}, "quantization_config.quant_method vptq is not supported"),
        ({"hidden_act": "prelu"}, "hidden_act prelu is not supported"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype float8_e4m3fn is not supported"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide num_attention_heads 8"),
        ({"num_attention_heads": 7}, "num_attention_heads 7 does not divide hidden_size 64"),
        ({"head_dim": 514}, "head_dim 514 is more than the 512"),
        ({"eos_token_id": "two"}, "eos_token_id must be an integer or a list"),
        ({"eos_token_id": [2, -1]}, r"eos_token_id must be .* 0 or more, not \[2, -1\]"),
        ({"eos_token_id": True}, "eos_token_id must be .* 0 or more, not True"),
        ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, "rope_scaling.rope_type ntk is not supported"),
        ({"rope_scaling": {"type": "dynamic"}}, 'has no "rope_scaling.factor"'),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}, "head_dim": 2}, "more than 2 rotated entries"),
        (
            {"rope_scaling": LONGROPE | {"long_factor": [1.0]}},
            "rope_scaling.long_factor must have 4 numbers, half of .* says, not 1",
        ),
        ({"rope_scaling": LONGROPE | {"short_factor": [1, 1, 1, -1]}}, "short_factor must be a list of positive"),
        ({"rope_scaling": {"type": "longrope", "long_factor": [1] * 4}}, 'has no "rope_scaling.short_factor"'),
        ({"rope_scaling": {"type": "linear"}}, 'has no "rope_scaling.factor"'),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, 'has no "rope_parameters.low_freq_factor"'),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters must be one object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5 is not supported"),
        ({"rope_parameters": {"unheard_of": 2.0}}, '"rope_parameters.unheard_of" is not understood'),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"logit_scale": 0.5}, '"logit_scale" is not understood'),
        ({"sliding_window": 24}, '"sliding_window" is not understood'),
        (arch("Mistral") | {"mlp_bias": True}, '"mlp_bias" is not understood'),
        (arch("Qwen2") | {"attention_bias": True}, '"attention_bias" is not understood'),
        ({"is_causal": False}, '"is_causal" is not understood'),
        ({"model_type": "mistral"}, "model_type mistral is not that of the architectures, LlamaForCausalLM"),
        (arch("Qwen3") | {"use_sliding_window": True, "layer_types": ["full_attention"]}, "num_hidden_layers, 4"),
        (
            arch("Qwen3") | {"use_sliding_window": True, "layer_types": ["linear_attention"] * 4},
            "layer_types linear_attention",
        ),
    ],
)
def test_refusals(tmp_path, fields, message):
    with pytest.raises(ModelError, match=message):
        spec_of(tmp_path, **fields)


def test_folder_errors(tmp_path):
    with pytest.raises(ModelError, match="nowhere does not exist"):
        load_model_spec(str(tmp_path / "nowhere"))
    with pytest.raises(ModelError, match="is empty"):
        load_model_spec(str(tmp_path))
    (tmp_path / "readme").touch()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load_model_spec(str(tmp_path))
    with pytest.raises(ModelError, match="is not a folder"):
        load_model_spec(str(tmp_path / "readme"))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json is not valid JSON"):
        load_model_spec(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="must hold a JSON object, not list"):
        load_model_spec(str(tmp_path))


def test_check_parallel(tmp_path):
    spec = spec_of(tmp_path)
    for tp in (1, 2, 4, 8):
        check_parallel(spec, tp)
    assert [spec.kv_heads_per_rank(tp) for tp in (1, 2, 4, 8)] == [4, 2, 1, 1]
    with pytest.raises(ModelError, match="tensor_parallel_size 16 does not divide the model's 8 attention heads"):
        check_parallel(spec, 16)
    with pytest.raises(ModelError, match=r"tensor_parallel_size 4 neither divides .* the model's 6 KV heads"):
        check_parallel(spec_of(tmp_path, num_attention_heads=12, num_key_value_heads=6, head_dim=8), 4)
    with pytest.raises(ModelError, match="tensor_parallel_size 8 does not divide the model's intermediate_size 164"):
        check_parallel(spec_of(tmp_path, intermediate_size=164), 8)


def test_every_architecture_has_a_class():
    from rayllm.models.registry import MODEL_CLASSES

    assert list(MODEL_CLASSES) == list(ARCHITECTURES)


def test_imports_no_torch():
    code = (
        "import sys, rayllm.config.model_folder; assert not {'torch', 'transformers', 'safetensors'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
