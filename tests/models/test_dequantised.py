"""Checkpoints in fewer bits are the models that their stored numbers mean, whole and over ranks; or are refused."""

from __future__ import annotations

import functools
import json
import logging

import numpy as np
import pytest
import support.model_factory as factory
import support.quantised as quantised
import torch
from safetensors.torch import load_file, save_file

from rayllm import LLM, SamplingParams
from rayllm.config.json_fields import JsonFields
from rayllm.config.quantization import parse_quantization
from rayllm.errors import ModelError
from rayllm.models.dequantised import DequantisedCheckpoint
from rayllm.models.loader import Checkpoint
from rayllm.parallel.tp_group import TPGroup

PROJECTIONS = ("_proj.weight",)
AND_HEAD = ("_proj.weight", "lm_head.weight")
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
FP8_BLOCKS = FP8 | {"weight_block_size": [64, 48], "modules_to_not_convert": ["model.norm"]}


def one_scale(weight, name="weight_scale", shape=(1,)):
    """A scale a tensor, and one of activations."""
    tensors, meant = quantised.fp8(weight, weight.shape, name, shape)
    return tensors | {"input_scale": torch.tensor(0.5)}, meant


CASES = {
    # Blocks that neither rows, columns nor ranks divide.
    "fp8": (FP8_BLOCKS, functools.partial(quantised.fp8, block=(64, 48)), AND_HEAD),
    "fp8-tensor": (FP8 | {"activation_scheme": "static", "weight_block_size": None}, one_scale, PROJECTIONS),
    "fp8-tensor-mistral": (
        FP8 | {"weight_block_size": None, "dequantize": False},
        functools.partial(one_scale, name="weight_scale_inv", shape=()),
        PROJECTIONS,
    ),
}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True, "damp_percent": 0.01}
CASES |= {
    "gptq": (GPTQ, functools.partial(quantised.gptq, group=32, bits=4, symmetric=True), PROJECTIONS),
    "gptq-ordered": (
        GPTQ | {"desc_act": True, "sym": False, "checkpoint_format": "gptq"},
        functools.partial(quantised.gptq, group=32, bits=4, symmetric=False, shuffled=True),
        PROJECTIONS,
    ),
    "gptq-v2": (
        GPTQ | {"sym": False, "checkpoint_format": "gptq_v2", "dynamic": {"-:.*lm_head": {}}},
        functools.partial(quantised.gptq, group=32, bits=4, symmetric=False, first_form=False),
        PROJECTIONS,
    ),
    # 96, 128 and 160 inputs in groups of 64.
    "gptq-8": (
        GPTQ | {"bits": 8, "group_size": 64},
        functools.partial(quantised.gptq, group=64, bits=8, symmetric=False),
        PROJECTIONS,
    ),
    "gptq-row": (
        GPTQ | {"group_size": -1},
        functools.partial(quantised.gptq, group=-1, bits=4, symmetric=True),
        PROJECTIONS,
    ),
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
CASES |= {"awq": (AWQ, functools.partial(quantised.awq, group=32), PROJECTIONS)}


def compressed(form, **weights):
    """A quantization_config of one group."""
    group = {"targets": ["Linear"], "weights": {"dynamic": False, "observer": "minmax"} | weights}
    group |= {"input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["re:.*lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


FLOAT, INT, INT4 = {"num_bits": 8, "type": "float"}, {"num_bits": 8, "type": "int"}, {"num_bits": 4, "type": "int"}
PACKED = functools.partial(quantised.packed, group=32, bits=4, symmetric=True)
CASES |= {
    "ct-fp8-row": (
        compressed("float-quantized", **FLOAT, strategy="channel"),
        lambda weight: quantised.fp8(weight, (1, weight.shape[1]), "weight_scale"),
        PROJECTIONS,
    ),
    "ct-fp8-tensor": (compressed("float-quantized", **FLOAT, strategy="tensor"), one_scale, PROJECTIONS),
    "ct-fp8-block": (
        compressed("float-quantized", **FLOAT, strategy="block", block_structure=[64, 48]),
        functools.partial(quantised.fp8, block=(64, 48), name="weight_scale"),
        PROJECTIONS,
    ),
    "ct-int8": (
        compressed("int-quantized", **INT, strategy="channel"),
        functools.partial(quantised.int8, symmetric=True),
        PROJECTIONS,
    ),
    "ct-int8-zeros": (
        compressed("int-quantized", **INT, strategy="channel", symmetric=False),
        functools.partial(quantised.int8, symmetric=False),
        PROJECTIONS,
    ),
    "ct-int4": (compressed("pack-quantized", **INT4, strategy="group", group_size=32), PACKED, PROJECTIONS),
    # The head has 259 rows, which do not fill the words of zero points.
    "ct-int4-zeros": (
        compressed("pack-quantized", **INT4, strategy="group", group_size=32, symmetric=False, actorder="weight"),
        functools.partial(PACKED, symmetric=False),
        AND_HEAD,
    ),
    "ct-int4-ordered": (
        compressed("pack-quantized", **INT4, strategy="group", group_size=32, actorder="group"),
        functools.partial(PACKED, shuffled=True),
        PROJECTIONS,
    ),
    "ct-int4-row": (
        compressed("pack-quantized", **INT4, strategy="channel"),
        functools.partial(PACKED, group=-1),
        PROJECTIONS,
    ),
    "ct-int8-packed": (
        compressed("pack-quantized", **INT, strategy="group", group_size=32),
        functools.partial(PACKED, bits=8),
        PROJECTIONS,
    ),
}


def make(tmp_path, case, kind="llama", ends=None):
    """(a tiny model in fewer bits, the same as these bits mean it)."""
    config, write, projections = CASES[case]
    folder = tmp_path / kind
    factory.make_model(folder, kind, num_hidden_layers=2)
    return folder, quantised.quantise(folder, config, write, ends or projections)


def edit(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def configure(folder, **fields):
    """Change fields of the quantization_config."""
    told = json.loads((folder / "config.json").read_text())["quantization_config"]
    quantised.set_config(folder, quantization_config=told | fields)


def state(folder, rank=0, size=1, **options):
    model = factory.load(folder, TPGroup(rank, size, None if size == 1 else object()), **options)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("case", CASES)
def test_weights_are_what_the_stored_numbers_mean(tmp_path, case):
    """To the bit, and those of every rank its slices of the whole, also where blocks and words cross its borders."""
    folder, plain = make(tmp_path, case)
    for rank, size in ((0, 1), (0, 2), (1, 2), (5, 8)):
        found, expected = state(folder, rank, size), state(plain, rank, size)
        assert found.keys() == expected.keys()
        for name, weight in expected.items():
            assert torch.equal(found[name], weight), name
    assert torch.equal(state(folder, dtype="bfloat16")["norm.weight"], state(plain)["norm.weight"].bfloat16())


@pytest.mark.parametrize(
    ("kind", "case", "ends"),
    [
        ("qwen3_moe", "fp8", None),
        ("qwen3_moe", "ct-int4", None),
        ("mixtral", "awq", ("_proj.weight", "w1.weight", "w2.weight", "w3.weight")),
        ("phi3", "gptq-ordered", None),  # of fused projections
        ("deepseek_v3", "fp8", ("_proj.weight", "_mqa.weight")),  # of heads that are taken apart
        ("qwen2_5_vl", "fp8-tensor-mistral", None),  # the text of a model that sees
    ],
)
def test_other_families(tmp_path, kind, case, ends):
    folder, plain = make(tmp_path, case, kind, ends)
    assert len(load_file(folder / "model.safetensors")) > 20 + len(load_file(plain / "model.safetensors"))
    for rank, size in ((0, 1), (1, 2)):
        found, expected = state(folder, rank, size), state(plain, rank, size)
        for name, weight in expected.items():
            assert torch.equal(found[name], weight), name


def test_greedy_tokens_and_the_line_that_says_so(tmp_path, caplog):
    folder, plain = make(tmp_path, "fp8")
    prompts = [{"prompt_token_ids": list(range(3, 240, 8))}, {"prompt_token_ids": [7, 8, 9]}]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    tokens = {}
    with caplog.at_level(logging.INFO, logger="rayllm"):
        for each in (folder, plain):
            with LLM(str(each), device="cpu", skip_tokenizer_init=True, num_gpu_blocks_override=32) as llm:
                tokens[each] = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    assert tokens[folder] == tokens[plain]
    lines = [record.getMessage() for record in caplog.records if "weights are stored" in record.getMessage()]
    assert lines == [
        "weights are stored in fp8 (blocks of 64 x 48) and dequantised to float32 while they load: "
        "they take as much memory as float32 ones"
    ]


def test_dummy_weights_are_made_as_if_nothing_was_quantised(tmp_path):
    folder, plain = make(tmp_path, "fp8")
    found, expected = state(folder, load_format="dummy", seed=3), state(plain, load_format="dummy", seed=3)
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def drop(*names):
    return lambda tensors: [tensors.pop(f"model.layers.0.{name}") for name in names]


def put(name, tensor):
    return lambda tensors: tensors.update({f"model.layers.0.{name}": tensor})


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        (
            "fp8",
            drop("mlp.up_proj.weight_scale_inv"),
            r"lacks 1 weight \(model\.layers\.0\.mlp\.up_proj\.weight_scale_inv",
        ),
        ("fp8", drop("mlp.up_proj.weight"), r"lacks 1 weight \(model\.layers\.0\.mlp\.up_proj\.weight\)"),
        (
            "fp8",
            put("mlp.up_proj.weight_scale_inv", torch.ones(2, 2)),
            r"up_proj\.weight_scale_inv has shape \[2, 2\], but config\.json asks for \[3, 2\]",
        ),
        (
            "fp8",
            put("mlp.up_proj.weight_scale_inv", torch.ones(3, 2, dtype=torch.int8)),
            r"up_proj\.weight_scale_inv is stored as I8, which is not supported",
        ),
        (
            "fp8",
            put("mlp.up_proj.weight", torch.ones(160, 96, dtype=torch.float8_e5m2)),
            r"up_proj\.weight is stored as F8_E5M2, which is not supported",
        ),
        ("fp8", put("mlp.up_proj.lut", torch.ones(3)), r"has 1 weight \(.*layers\.0\.mlp\.up_proj\.lut\) that its"),
        ("gptq", drop("mlp.up_proj.qzeros"), r"lacks 1 weight \(.*layers\.0\.mlp\.up_proj\.qzeros\)"),
        ("gptq-ordered", drop("mlp.up_proj.g_idx"), r"lacks 1 weight \(.*layers\.0\.mlp\.up_proj\.g_idx\)"),
        ("gptq", drop("mlp.up_proj.qweight"), r"lacks 1 weight \(.*layers\.0\.mlp\.up_proj\.weight\)"),
        (
            "gptq",
            put("mlp.up_proj.qweight", torch.ones(12, 80, dtype=torch.int32)),
            r"up_proj\.qweight has shape \[12, 80\], but config\.json asks for \[12, 160\]",
        ),
        (
            "gptq",
            put("mlp.up_proj.g_idx", torch.arange(96, dtype=torch.int32) % 3),
            r"up_proj\.g_idx is in another order than that of the inputs",
        ),
        (
            "gptq-ordered",
            put("mlp.up_proj.g_idx", torch.full((96,), 3, dtype=torch.int32)),
            r"up_proj\.g_idx has groups outside 0 to 2",
        ),
        ("gptq", put("mlp.up_proj.bias", torch.ones(160)), r"up_proj\.bias is not zero, but config\.json has no place"),
        ("awq", drop("self_attn.o_proj.scales"), r"lacks 1 weight \(.*o_proj\.scales\)"),
        (
            "ct-int4",
            put("mlp.up_proj.weight_shape", torch.tensor([160, 95])),
            r"up_proj\.weight_shape is \[160, 95\], but config\.json asks for \[160, 96\]",
        ),
        ("ct-int4-zeros", drop("mlp.up_proj.weight_zero_point"), r"lacks 1 weight \(.*up_proj\.weight_zero_point\)"),
        ("ct-int4-ordered", drop("mlp.up_proj.weight_g_idx"), r"lacks 1 weight \(.*up_proj\.weight_g_idx\)"),
        (
            "ct-int8",
            put("mlp.up_proj.weight_zero_point", torch.ones(160, 1, dtype=torch.int8)),
            r"up_proj\.weight_zero_point is not zero, but config\.json says symmetric",
        ),
        (
            "fp8-tensor",
            put("mlp.up_proj.weight_scale", torch.ones(3)),
            r"up_proj\.weight_scale has shape \[3\], but config\.json asks for \[1, 1\]",
        ),
    ],
)
def test_bad_tensors(tmp_path, case, change, message):
    folder, _ = make(tmp_path, case)
    edit(folder, change)
    with pytest.raises(ModelError, match=message):
        state(folder)


def test_words_that_outputs_do_not_fill(tmp_path):
    folder, _ = make(tmp_path, "gptq")
    edit(folder, lambda tensors: tensors.update({"lm_head.qweight": tensors.pop("lm_head.weight").int()}))
    with pytest.raises(ModelError, match=r"lm_head\.qweight packs 8 numbers a word, no divisor of 259"):
        state(folder)


def test_a_fused_projection(tmp_path):
    """One weight of which a layer takes slices of rows."""
    weight = np.random.default_rng(0).normal(size=(96, 64)).astype(np.float32)
    tensors, meant = quantised.awq(weight, 32)
    save_file({f"qkv_proj.{last}": tensor for last, tensor in tensors.items()}, tmp_path / "model.safetensors")
    source = DequantisedCheckpoint(Checkpoint(str(tmp_path)), spec_of(AWQ), torch.device("cpu"))
    for start, stop in ((0, 32), (20, 31), (64, 96)):
        found = source.slice("qkv_proj.weight", (96, 64), 0, start, stop)
        assert torch.equal(found, torch.from_numpy(meant)[start:stop])
    source.finish()


def test_formats_side_by_side(tmp_path):
    """Attention in fp8 and the MLP in int4, in groups of config.json that patterns tell apart."""
    config, fp8, packed = compressed("mixed-precision"), CASES["ct-fp8-row"], CASES["ct-int4"]
    config["config_groups"] = {
        "a": fp8[0]["config_groups"]["group_0"] | {"targets": ["re:.*self_attn.*"], "format": "float-quantized"},
        "b": packed[0]["config_groups"]["group_0"] | {"targets": ["re:.*mlp.*"], "format": "pack-quantized"},
    }
    folder = tmp_path / "llama"
    factory.make_model(folder, "llama", num_hidden_layers=2)
    attention = tuple(f"self_attn.{part}_proj.weight" for part in "qkvo")
    middle = quantised.quantise(folder, config, fp8[1], attention)
    stored = load_file(folder / "model.safetensors")
    plain = quantised.quantise(middle, config, packed[1], ("gate_proj.weight", "up_proj.weight", "down_proj.weight"))
    in_int4 = {name: tensor for name, tensor in load_file(middle / "model.safetensors").items() if ".mlp." in name}
    save_file({name: t for name, t in stored.items() if ".mlp." not in name} | in_int4, folder / "model.safetensors")
    quantised.set_config(plain, quantization_config=None)
    found, expected = state(folder), state(plain)
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    configure(folder, config_groups={"b": config["config_groups"]["b"]})
    with pytest.raises(ModelError, match=r"q_proj\.weight is stored as F8_E4M3, which is not supported"):
        state(folder)


def spec_of(told):
    return parse_quantization(JsonFields({"quantization_config": told}, "config.json"))


def test_experts_in_mxfp4(tmp_path):
    """As gpt-oss stores them: outputs before inputs, where unquantised ones have inputs first."""
    weight = np.random.default_rng(0).normal(size=(4, 24, 96)).astype(np.float32)
    blocks, scales, meant = quantised.mxfp4(weight)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    bias, router = torch.randn(4, 24), torch.randn(4, 96)
    file = tmp_path / "model.safetensors"
    tensors = {name + "_blocks": blocks, name + "_scales": scales, name + "_bias": bias, "router.weight": router}
    save_file(tensors, file)
    spec = spec_of({"quant_method": "mxfp4"})

    def source():
        return DequantisedCheckpoint(Checkpoint(str(tmp_path)), spec, torch.device("cpu"))

    whole, found = torch.from_numpy(meant).transpose(1, 2), source()
    assert found.choose("model.layers.0.mlp.experts.0.up_proj.weight", name) == name
    assert torch.equal(found.tensor(name, (4, 96, 24)), whole)
    assert torch.equal(found.slice(name, (4, 96, 24), 0, 1, 3), whole[1:3])
    assert torch.equal(found.slice(name, (4, 96, 24), 1, 40, 70), whole[:, 40:70])
    assert torch.equal(found.slice(name, (4, 96, 24), 2, 12, 24), whole[:, :, 12:])
    assert torch.equal(found.slice(name + "_bias", (4, 24), 1, 6, 12), bias[:, 6:12])
    assert torch.equal(found.tensor("router.weight", (4, 96)), router)
    found.finish()
    with pytest.raises(ModelError, match=r"gate_up_proj_blocks has shape \[4, 24, 3, 16\], but .* \[4, 48, 3, 16\]"):
        source().tensor(name, (4, 96, 48))
    with pytest.raises(ModelError, match=r"gate_up_proj has 100 inputs, no multiple of the 32 of a scale"):
        source().tensor(name, (4, 100, 24))
    save_file({key: tensor for key, tensor in tensors.items() if not key.endswith("_scales")}, file)
    found = source()
    assert not found.tensor(name, (4, 96, 24)).isnan().any()
    with pytest.raises(ModelError, match=r"lacks 1 weight \(.*gate_up_proj_scales\)"):
        found.finish()
