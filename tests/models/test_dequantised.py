"""Checkpoints in fewer bits are the models that their stored numbers mean, whole and over ranks; or are refused."""

from __future__ import annotations

import functools
import json
import logging

import pytest
import support.model_factory as factory
import support.quantised as quantised
import torch
from safetensors.torch import load_file, save_file

from rayllm import LLM, SamplingParams
from rayllm.errors import ModelError
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


def make(tmp_path, case, kind="llama"):
    """(a tiny model in fewer bits, the same as these bits mean it)."""
    config, write, ends = CASES[case]
    folder = tmp_path / kind
    factory.make_model(folder, kind, num_hidden_layers=2)
    return folder, quantised.quantise(folder, config, write, ends)


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
