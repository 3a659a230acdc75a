"""quantization_config: what each format's fields come to, and every value that is refused, by its name."""

from __future__ import annotations

import pytest

from rayllm.config.json_fields import JsonFields
from rayllm.config.quantization import WeightFormat, parse_quantization
from rayllm.errors import ModelError

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True, "dynamic": False}
FLOAT = {"num_bits": 8, "type": "float", "strategy": "channel"}


def compressed(weights=None, form="pack-quantized", group=None, **fields):
    told = {"targets": ["Linear"], "weights": WEIGHTS if weights is None else weights} | (group or {})
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"g": told}} | fields


def parse(told):
    return parse_quantization(JsonFields({"quantization_config": told}, "config.json"))


@pytest.mark.parametrize(
    ("told", "expected", "said"),
    [
        (FP8, WeightFormat("fp8", 8, (128, 128), activations="dynamic"), "fp8 (blocks of 128 x 128)"),
        (
            {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
            WeightFormat("fp8", 8, (None, None), activations="static"),
            "fp8 (one scale a tensor)",
        ),
        (
            FP8 | {"scale_fmt": "ue8m0", "fmt": "float8_e4m3fn"},
            WeightFormat("fp8", 8, (128, 128), activations="dynamic"),
            None,
        ),
        (
            GPTQ | {"sym": True, "damp_percent": 0.1, "meta": {"quantizer": ["gptqmodel:2"]}, "static_groups": False},
            WeightFormat("gptq", 4, (1, 128), symmetric=False, first_form=True),
            "int4 (GPTQ, groups of 128)",
        ),
        (
            GPTQ | {"bits": 8, "group_size": -1, "desc_act": True, "checkpoint_format": "gptq_v2", "format": "gptq_v2"},
            WeightFormat("gptq", 8, (1, None), symmetric=False, ordered=True),
            "int8 (GPTQ, one scale a channel)",
        ),
        (AWQ, WeightFormat("awq", 4, (1, 128), symmetric=False), "int4 (AWQ, groups of 128)"),
        (compressed(), WeightFormat("packed", 4, (1, 128)), "int4 (groups of 128)"),
        (
            compressed(
                WEIGHTS | {"symmetric": False, "actorder": "static", "group_size": 32, "zp_dtype": "torch.int8"}
            ),
            WeightFormat("packed", 4, (1, 32), symmetric=False),
            "int4 (groups of 32)",
        ),
        (compressed(WEIGHTS | {"actorder": "dynamic"}), WeightFormat("packed", 4, (1, 128), ordered=True), None),
        (
            compressed(
                FLOAT,
                "float-quantized",
                {"input_activations": {"dynamic": True}},
                sparsity_config={"format": "dense", "global_sparsity": 0.1},
            ),
            WeightFormat("fp8", 8, (1, None), activations="dynamic"),
            "fp8 (one scale a channel)",
        ),
        (compressed({}, "int-quantized"), WeightFormat("int8", 8, (None, None)), "int8 (one scale a tensor)"),
        (
            compressed(
                FLOAT | {"strategy": "block", "block_structure": [128, 64]}, group={"format": "naive-quantized"}
            ),
            WeightFormat("fp8", 8, (128, 64)),
            "fp8 (blocks of 128 x 64)",
        ),
        ({"quant_method": "mxfp4", "modules_to_not_convert": []}, WeightFormat("mxfp4", 4, (1, 32)), None),
    ],
)
def test_formats(told, expected, said):
    spec = parse(told)
    assert spec.format_of("model.layers.0.mlp.up_proj") == expected
    assert said is None or str(spec) == said


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (None, None),
        ({"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}, "dynamic"),
        ({"num_bits": 8, "type": "float", "dynamic": False, "strategy": "tensor"}, "static"),
        ({"num_bits": 8, "type": "float", "dynamic": False, "strategy": "channel"}, None),
        ({"num_bits": 8, "type": "int", "dynamic": True}, None),
    ],
)
def test_how_activations_are_rounded(told, expected):
    spec = parse(compressed(FLOAT, "float-quantized", {"input_activations": told}))
    assert spec.format_of("up_proj").activations == expected
    assert parse(compressed(group={"input_activations": told})).format_of("up_proj").activations is None  # of int4


def test_modules_left_out():
    """Where tensors tell, nobody asks; where weights are made up, they count."""
    spec = parse(compressed(ignore=["lm_head", "model.layers.1", "re:.*gate$"]))
    assert spec.format_of("lm_head") is not None
    assert spec.made_up("model.layers.0.mlp.up_proj") is not None
    assert spec.made_up("model.layers.10.mlp.up_proj") is not None
    left_out = ("lm_head", "model.layers.1.mlp.up_proj", "model.layers.0.mlp.gate")
    assert [spec.made_up(name) for name in left_out] == [None] * 3


@pytest.mark.parametrize("told", [None, {}, {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}}])
def test_weights_that_are_not_quantised(told):
    assert parse(told) is None


def test_groups_by_name_then_pattern_then_class():
    names = ("all", "attention", "one")
    targets = (["Linear"], ["re:.*self_attn.*"], ["model.layers.0.self_attn.q_proj"])
    groups = {
        name: {"targets": target, "weights": WEIGHTS | {"group_size": 32 * (1 + at)}}
        for at, (name, target) in enumerate(zip(names, targets, strict=True))
    }
    spec = parse(compressed() | {"config_groups": groups})

    def size(*module):
        return spec.format_of(*module).block[1]

    assert size("model.layers.0.mlp.up_proj") == 32
    assert size("model.layers.0.self_attn.k_proj") == 64
    assert size("model.layers.0.self_attn.q_proj") == 96
    assert size("a.q_proj", "model.layers.0.self_attn.q_proj") == 96
    assert str(spec) == "int4 (groups of 32) and int4 (groups of 64) and int4 (groups of 96)"
    del groups["all"]
    assert parse(compressed() | {"config_groups": groups}).format_of("lm_head") is None


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ([1], r"quantization_config must be an object, not \[1\]"),
        ({"bits": 4}, r'config\.json has no "quantization_config\.quant_method"'),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            r"quantization_config\.quant_method bitsandbytes is not",
        ),
        ({"quant_method": "modelopt"}, "quant_method modelopt is not supported; supported are fp8, compressed-tensors"),
        (FP8 | {"fmt": "e5m2"}, r"quantization_config\.fmt e5m2 is not supported; supported are e4m3"),
        (FP8 | {"activation_scheme": "none"}, "activation_scheme none is not supported"),
        (FP8 | {"weight_block_size": [128]}, r"weight_block_size must be two positive integers, not \[128\]"),
        (FP8 | {"scale_fmt": "e4m3"}, "scale_fmt e4m3 is not supported"),
        (FP8 | {"expert_dtype": "fp4"}, "expert_dtype fp4 is not supported"),
        (FP8 | {"unheard_of": 1}, r'"quantization_config\.unheard_of" is not understood'),
        (
            FP8 | {"modules_to_not_convert": "lm_head"},
            "modules_to_not_convert must be a list of modules, not 'lm_head'",
        ),
        ({"quant_method": "gptq"}, r'has no "quantization_config\.bits"'),
        (GPTQ | {"bits": 3}, r"quantization_config\.bits 3 is not supported; supported are 4, 8"),
        (GPTQ | {"group_size": 0}, "group_size must be a positive integer or -1, not 0"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format marlin is not supported"),
        (GPTQ | {"checkpoint_format": "gptq", "format": "gptq_v2"}, "format is not that of checkpoint_format"),
        (GPTQ | {"is_marlin_format": True}, r'"quantization_config\.is_marlin_format" is not understood'),
        (GPTQ | {"pack_dtype": "int8"}, "pack_dtype int8 is not supported"),
        (
            GPTQ | {"dynamic": {"+:.*down.*": {"bits": 8}}},
            "dynamic: modules with settings of their own are not supported",
        ),
        (GPTQ | {"rotation": "hadamard"}, r'"quantization_config\.rotation" is not understood'),
        (AWQ | {"version": "gemv"}, r"quantization_config\.version gemv is not supported; supported are gemm"),
        (AWQ | {"version": "marlin"}, "version marlin is not supported"),
        (AWQ | {"bits": 8}, "bits 8 is not supported; supported are 4"),
        (AWQ | {"backend": "llm-awq"}, "backend llm-awq is not supported"),
        (compressed(form="nvfp4-pack-quantized"), r"config_groups\.g\.format nvfp4-pack-quantized is not supported"),
        (compressed(form="marlin-24"), r"config_groups\.g\.format marlin-24 is not supported"),
        (compressed(form="dense"), r"config_groups\.g\.format dense is not supported"),
        (compressed(group={"format": "mxfp8-quantized"}), r"config_groups\.g\.format mxfp8-quantized is not supported"),
        (compressed(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config: sparse weights are not"),
        (
            compressed(transform_config={"config_groups": {"u": {}}}),
            r'"quantization_config\.transform_config" is not under',
        ),
        (compressed() | {"config_groups": {}}, r'has no "quantization_config\.config_groups"'),
        (
            compressed(group={"output_activations": {"num_bits": 8}}),
            r'"quantization_config\.config_groups\.g\.output_act',
        ),
        (compressed(group={"weights": None}), r"config_groups\.g\.weights must be an object, not None"),
        (compressed(group={"targets": "Linear"}), "targets must be a list of strings, not 'Linear'"),
        (compressed(ignore=["re:("]), r"ignore: re:\( is no pattern"),
        (compressed(group={"targets": ["re:("]}), r"targets: re:\( is no pattern"),
        (compressed(WEIGHTS | {"num_bits": 2}), r"config_groups\.g\.weights\.num_bits 2 is not supported"),
        (compressed(WEIGHTS | {"type": "float"}), r"weights\.type float is not supported; supported are int"),
        (compressed(WEIGHTS | {"strategy": "tensor_group"}), r"weights\.strategy tensor_group is not supported"),
        (
            compressed(WEIGHTS | {"group_size": None}),
            r'has no "quantization_config\.config_groups\.g\.weights\.group_size"',
        ),
        (compressed(WEIGHTS | {"strategy": "channel"}), "group_size 128 needs the strategy group, not channel"),
        (compressed(WEIGHTS | {"actorder": "random"}), r"weights\.actorder random is not supported"),
        (compressed(WEIGHTS | {"actorder": 1.5}), r"weights\.actorder must be a string, not 1\.5"),
        (compressed(WEIGHTS | {"dynamic": True}), r'"quantization_config\.config_groups\.g\.weights\.dynamic" is not'),
        (
            compressed(FLOAT | {"symmetric": False}, "float-quantized"),
            r"weights\.symmetric must be true for type float",
        ),
        (compressed(FLOAT | {"num_bits": 4}, "float-quantized"), "num_bits 4 is not supported; supported are 8"),
        (compressed(FLOAT, "int-quantized"), r"weights\.type float is not supported; supported are int"),
        (compressed(FLOAT | {"strategy": "block"}, "float-quantized"), "block_structure must be two positive integers"),
        ({"quant_method": "mxfp4", "group_size": 16}, r'"quantization_config\.group_size" is not understood'),
    ],
)
def test_refusals(told, message):
    with pytest.raises(ModelError, match=message):
        parse(told)
