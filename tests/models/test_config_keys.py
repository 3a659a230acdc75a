"""Keys of config.json, changed one at a time: the same mathematics as transformers, or a refusal that names the key.

Every key of each architecture's class in transformers, those that real checkpoints bring beside them, and those of all
other causal language models in transformers.
"""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from copy import deepcopy
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
import support.model_factory as factory
import torch
import transformers
from safetensors.torch import save_file
from support.kinds import CONFIGS
from support.yardstick import in_float64, share_of_roundings
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rayllm.config.model_folder import load_model_spec
from rayllm.errors import ModelError

PLAIN = (
    *("llama", "mistral", "qwen2", "qwen3", "opt", "bloom"),
    *(
        "phi3",
        "glm",
        "glm4",
        "ministral",
        "ministral3",
        "granite",
        "smollm3",
        "gemma2",
        "gemma3",
        "qwen3_moe",
        "mixtral",
    ),
    *("glm4_moe", "minimax_m2", "gpt_oss", "qwen2_moe", "gemma4", "gemma4_moe", "gemma4_unified"),
    *("deepseek_v3", "deepseek_v2", "glm4_moe_lite", "mistral4"),
    *("qwen3_5", "qwen3_5_moe", "qwen3_next"),
)
WITH_TOWERS = ("mistral3", "qwen2_5_vl", "qwen3_vl")  # for the keys of their text_config
OWN = (*PLAIN, *WITH_TOWERS)
KINDS = (*OWN, "phi4", "llama3_rope", "llama_linear", "llama_yarn")  # these for those of their rotary embedding
ABSENT = "no such key"
TOLERANCE = 1e-4  # of the logits' spread
WINDOWED = ["sliding_attention", "full_attention"]

# Values of keys whose type does not tell which values are worth a try. Two layers, 8 heads of 16 (BLOOM: 12 of 8).
VALUES: dict[str, list[Any]] = {
    "activation_function": ["gelu", "gelu_new", "silu", "gelu_pytorch_tanh", "gelu_fast", "tanh", "quick_gelu"],
    "architectures": [["GPT2LMHeadModel"], ["MistralForCausalLM", "LlamaForCausalLM"]],
    "attn_logit_softcapping": [30.0, None],
    "bos_token_id": [7, None],
    "dtype": ["bfloat16", "float16"],
    "eos_token_id": [7, [7, 8], None],
    "final_logit_softcapping": [20.0, None],
    "head_dim": [8, 24, None],
    "hidden_act": ["gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "swish", "relu", "quick_gelu"],
    "hidden_activation": ["gelu", "gelu_new", "gelu_fast", "silu", "relu", "quick_gelu"],
    "hidden_size": [192],
    "id2label": [{"0": "a", "1": "b", "2": "c"}],
    "label2id": [{"a": 0, "b": 1}],
    "layer_types": [
        WINDOWED,
        ["full_attention"] * 2,
        ["sliding_attention"] * 2,
        ["chunked_attention"] * 2,
        ["full_attention"],
        None,
    ],
    "max_position_embeddings": [64, 1024],
    "max_window_layers": [0, 1],
    "model_type": ["llama", "mistral", "qwen2", "qwen3", "opt", "bloom", "granite"],
    "n_embed": [192],
    "n_head": [4],
    "n_layer": [3],
    "num_attention_heads": [4],
    "num_hidden_layers": [3],
    "num_key_value_heads": [1, 8, None],
    "original_max_position_embeddings": [32],
    "pad_token_id": [7, None],
    "pretraining_tp": [2],
    "problem_type": ["regression"],
    "rms_norm_eps": [1e-2],
    "rope_theta": [500.0, 100],
    "router_jitter_noise": [0.1],
    "sliding_window": [8, None],
    "torch_dtype": ["bfloat16"],
    "vocab_size": [300],
    "word_embed_proj_dim": [64, None],
}
# Together with another key that it needs to have a meaning.
PAIRS: dict[str, list[dict[str, Any]]] = {
    "layer_types": [
        {"layer_types": WINDOWED, "use_sliding_window": True, "sliding_window": 8},
        {"layer_types": WINDOWED, "sliding_window": 8},
    ],
    "max_window_layers": [{"max_window_layers": 1, "use_sliding_window": True, "sliding_window": 8}],
    "slow_but_exact": [{"slow_but_exact": True, "pretraining_tp": 2}],
    "rope_local_base_freq": [{"rope_local_base_freq": 500.0, "rope_theta": 3000.0, "rope_parameters": ABSENT}],
    "sliding_window_pattern": [{"sliding_window_pattern": 1, "layer_types": ABSENT}],
    "use_sliding_window": [{"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}],
}
# What checkpoints hold that transformers' class of their architecture does not know, from fine-tunes, converters and
# other frameworks; and keys by which other code computes something else.
FOUND = {
    "_attn_implementation": "eager",
    "_attn_implementation_autoset": True,
    "_flash_attn_2_enabled": True,
    "_name_or_path": "somebody/model",
    "alibi": True,
    "attention_multiplier": 0.5,
    "attention_softmax_in_fp32": True,
    "auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil"},
    "bias_dropout_fusion": True,
    "cache_implementation": "hybrid",
    "do_sample": True,
    "dual_chunk_attention_config": {"chunk_size": 8},
    "embedding_multiplier": 12.0,
    "gradient_checkpointing": True,
    "is_causal": False,
    "is_decoder": True,
    "is_llama_config": True,
    "learned_embeddings": True,
    "logit_scale": 0.5,
    "logits_scaling": 8.0,
    "masked_softmax_fusion": True,
    "max_length": 20,
    "max_sequence_length": 2048,
    "model_max_length": 2048,
    "n_inner": 300,
    "no_rope_layers": [1, 0],
    "num_experts": 8,
    "num_labels": 3,
    "offset_alibi": 100,
    "original_max_position_embeddings": 32,
    "output_attentions": True,
    "partial_rotary_factor": 0.5,
    "per_layer_config": {"0": {"intermediate_size": 64}},
    "prefix": "</s>",
    "qk_layernorm": True,
    "quantization_config": {"quant_method": "bitsandbytes"},
    "query_pre_attn_scalar": 256,
    "residual_multiplier": 0.22,
    "rope_interleaved": True,
    "rope_local_base_freq": 500.0,
    "rope_scaling_factor": 2.0,
    "seq_length": 2048,
    "sliding_window_pattern": 3,
    "sliding_window_size": 8,
    "skip_bias_add": True,
    "skip_bias_add_qkv": False,
    "task_specific_params": {"text-generation": {"do_sample": True}},
    "temperature": 0.6,
    "tokenizer_class": "LlamaTokenizer",
    "torchscript": True,
    "transformers.js_config": {"dtype": "q4"},
    "transformers_weights": "other.safetensors",
    "unk_token_id": 0,
    "unsloth_version": "2024.9",
    "use_bfloat16": True,
    "use_flash_attention": True,
    "use_mrope": False,
    "use_sliding_window": True,
    "use_parallel_residual": True,
}
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional", "mrope", "unheard_of")
ROPE = {
    "attention_factor": 0.7,
    "attn_factor": 2.0,
    "beta_fast": 8.0,
    "beta_slow": 2.0,
    "extrapolation_factor": 2.0,
    "factor": 3.0,
    "finetuned": True,
    "high_freq_factor": 8.0,
    "long_factor": [2.0] * 8,
    "low_freq_factor": 2.0,
    "mrope_section": [2, 3, 3],
    "mscale": 0.7,
    "mscale_all_dim": 0.5,
    "original_max_position_embeddings": 32,
    "partial_rotary_factor": 0.5,
    "rope_theta": 500.0,
    "short_factor": [2.0] * 8,
    "truncate": False,
    "unheard_of": 2.0,
}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def other(default: Any) -> Any:
    """A value that is not the default."""
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float):
        return 2 * default or 1
    return "other" if isinstance(default, str) else 2


def defaults_of(config_class: type) -> dict[str, Any]:
    return {field.name: None if field.default is MISSING else field.default for field in fields(config_class)}


def own_changes(base: dict[str, Any], config_class: type) -> list[tuple[str, dict[str, Any]]]:
    """(key, fields of config.json to write) for the keys of the architecture and of checkpoints."""
    known = defaults_of(config_class)
    defaults = dict.fromkeys(VALUES) | base | known | FOUND
    changes = []
    for key, default in defaults.items():
        values = VALUES.get(key) or [FOUND.get(key, other(base.get(key, default)))]
        changes += [(key, {key: value}) for value in values]
        pairs = [pair for pair in PAIRS.get(key, []) if key not in known or pair.keys() <= known.keys()]
        changes += [(key, pair) for pair in pairs]
        if key in base:
            changes.append((key, {key: ABSENT}))
    return changes


def rope_changes(base: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    told = base["rope_parameters"]
    changes: list[tuple[str, dict[str, Any]]] = []
    if "full_attention" in told:
        return rope_changes_by_layer_type(told)
    for key, value in ROPE.items():
        for name in ("rope_parameters", "rope_scaling"):
            changes.append((key, {name: told | {key: value}}))
        changes.append((key, {name: {k: v for k, v in told.items() if k != key}}))
    for kind in ROPE_TYPES:
        changes.append(("rope", {"rope_parameters": told | {"rope_type": kind}}))
        changes.append(("rope", {"rope_parameters": ABSENT, "rope_scaling": {"type": kind, "factor": 2.0}}))
    changes.append(("rope", {"rope_parameters": {"full_attention": told, "sliding_attention": told}}))
    changes.append(("rope", {"rope_parameters": ABSENT, "rope_theta": 500.0}))
    return changes


def rope_changes_by_layer_type(told: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    changes: list[tuple[str, dict[str, Any]]] = [("rope", {"rope_parameters": told["full_attention"]})]
    for layer_type, own in told.items():
        changed = [(key, own | {key: value}) for key, value in ROPE.items()]
        changed += [(key, {k: v for k, v in own.items() if k != key}) for key in ROPE]
        changed += [("rope", own | {"rope_type": kind}) for kind in ROPE_TYPES]
        changes += [(key, {"rope_parameters": told | {layer_type: new}}) for key, new in changed]
        changes.append(("rope", {"rope_parameters": {k: v for k, v in told.items() if k != layer_type}}))
    for kind in ROPE_TYPES:
        changes.append(("rope", {"rope_parameters": ABSENT, "rope_scaling": {"type": kind, "factor": 2.0}}))
        changes.append(("rope", {"rope_scaling": {"rope_type": kind, "factor": 2.0}}))
    return changes


def foreign_changes(base: dict[str, Any], config_class: type) -> dict[str, Any]:
    """Key -> value, of the configs of all other causal language models in transformers."""
    known = {*base, *defaults_of(config_class), *FOUND, *VALUES}
    found: dict[str, Any] = {}
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        for key, default in defaults_of(transformers.CONFIG_MAPPING[model_type]).items():
            if key not in known:
                found.setdefault(key, other(default))
    return found


def text_of(base: dict[str, Any]) -> dict[str, Any]:
    """Of a model with towers, the text model's part."""
    return base.get("text_config", base)


def write(folder: Path, base: dict[str, Any], change: dict[str, Any]) -> None:
    """change: of the text model's keys."""
    told = {key: value for key, value in (text_of(base) | change).items() if value is not ABSENT}
    told = base | {"text_config": told} if "text_config" in base else told
    (folder / "config.json").write_text(json.dumps(told))


def refusal(folder: Path) -> str | None:
    try:
        load_model_spec(str(folder))
    except ModelError as error:
        return str(error)
    return None


def difference(folder: Path) -> float | str | None:
    """Largest difference of logits, over what it may be, in a prompt of 28 tokens and 3 greedy ones; None if
    transformers cannot compute the model of this config.json. Both get the same weights, which fit what transformers
    makes of it; if they do not fit what rayllm does, what it says of that.
    """
    try:
        hf_class = getattr(transformers, json.loads((folder / "config.json").read_text())["architectures"][0])
        hf = hf_class(hf_class.config_class.from_pretrained(folder)).eval()
        hf.set_experts_implementation("eager")  # others want sizes of whole vectors
    except Exception:
        return None
    factory.randomise(hf, 0)
    tensors, seen = {}, set()
    for name, tensor in hf.state_dict().items():
        if tensor.data_ptr() not in seen:  # a tied head is stored once
            seen.add(tensor.data_ptr())
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    try:
        # Where frequencies depend on the length, they are compared for lengths that both have the same for.
        length = min(64, load_model_spec(str(folder)).default_model_len)
        runner = factory.PagedRunner(factory.load(folder, max_model_len=length))
    except ModelError as error:
        return str(error)
    ids, cache, tokens = torch.randint(0, 256, (28,), generator=torch.Generator().manual_seed(3)).tolist(), None, []
    pairs = []
    for step in range(4):
        try:
            with torch.inference_mode():
                out = hf(torch.tensor([ids]), past_key_values=cache, use_cache=True, return_dict=True)
        except Exception:
            return None
        cache, tokens = out.past_key_values, tokens + ids
        pairs.append((runner.step([("a", ids)], num_decodes=min(step, 1))[0], out.logits[0]))
        ids = [int(out.logits[0, -1].argmax())]
    actual, expected = (torch.cat(side) for side in zip(*pairs, strict=True))
    apart = float((actual - expected).abs().max() / expected.std()) / TOLERANCE
    if 0.5 < apart < 10:  # what roundings come to in this model, which is not the same on all CPUs, decides
        with torch.inference_mode():
            exact = in_float64(hf)(torch.tensor([tokens]), return_dict=True).logits[0]
        return share_of_roundings(actual, expected, exact)
    return apart


# Served, though transformers fails: its validators refuse a null, which counts as absent here, and a whole number for
# dropout, one class does not survive its own default for head_dim, defaults of pad_token_id lie outside of a small
# vocabulary, and its layers cannot read a reply of another form.
FAILS = [
    {"attention_dropout": 1},
    {"head_dim": None},
    {"head_dim": ABSENT},
    {"layer_types": None},
    {"num_key_value_heads": None},
    {"pad_token_id": ABSENT},
    {"return_dict": False},
]


def verdict(folder: Path, base: dict[str, Any], key: str, change: dict[str, Any]) -> str:
    write(folder, base, change)
    return judge(folder, {key, *change}, served_though=change in FAILS)


def judge(folder: Path, names: set[str], *, served_though: bool = False) -> str:
    """names: of the keys that a refusal may name. served_though: it is known that transformers fails."""
    told = refusal(folder)
    if told is not None:
        return "refused" if any(name in told for name in names) else f"refused without its name: {told}"
    apart = difference(folder)
    if apart is None:
        return "transformers fails" if served_though else "served, but transformers fails"
    if isinstance(apart, str):
        absent = "tie_word_embeddings" in names and "lm_head" in apart
        return "refused" if absent else f"other weights: {apart}"
    return "parity" if apart <= 1 else f"different by {apart:.2g} of what roundings may come to"


def test_every_architecture_has_its_keys_changed():
    """Of models with towers, the text model's keys: by the type that config.json says."""
    types = {kind: config_type(kind) for kind in factory.KINDS}
    assert {types[kind] for kind in OWN} == set(types.values())


def config_type(kind: str) -> str:
    """The model type of the text model."""
    architecture, options = CONFIGS[kind]
    ending = "ForConditionalGeneration" if "text_config" in options else "ForCausalLM"
    config = getattr(transformers, architecture + ending).config_class(**deepcopy(options))
    return config.get_text_config().model_type


@pytest.mark.parametrize("kind", KINDS)
def test_same_mathematics_or_a_refusal(tmp_path, kind, full_matrix):
    folder = Path(factory.make_model(tmp_path, kind, num_hidden_layers=2))
    base = json.loads((folder / "config.json").read_text())
    text = text_of(base)
    config_class = transformers.CONFIG_MAPPING[text["model_type"]]
    changes = rope_changes(text) if "rope_parameters" in text else []
    changes += own_changes(text, config_class) if kind in OWN else []
    if kind in OWN and not full_matrix:
        changes = changes[OWN.index(kind) % 16 :: 16]
    if text is not base:  # a part's own dtype counts only where transformers makes it without reading any weights
        changes = [(key, change) for key, change in changes if key not in ("dtype", "torch_dtype")]
    verdicts = [(change, verdict(folder, base, key, change)) for key, change in changes]
    wrong = [
        f"{change}: {said}" for change, said in verdicts if said not in ("refused", "parity", "transformers fails")
    ]
    print(kind, dict(Counter(said for _, said in verdicts)))
    assert not wrong, "\n".join(wrong)


def flags_of(base: dict[str, Any], config_class: type) -> dict[str, Any]:
    """What is true or false in a config, the other way round, and a window that is shorter than the prompt."""
    known = defaults_of(config_class) | base
    flags = {key: not value for key, value in known.items() if isinstance(value, bool)}
    return flags | ({"sliding_window": 8} if "sliding_window" in known else {})


@pytest.mark.parametrize("kind", [kind for kind in factory.KINDS if "text_config" in CONFIGS[kind][1]])
def test_keys_beside_text_config(tmp_path, kind, full_matrix):
    """Of the text model, said beside it or in both places, by which transformers may or may not go."""
    folder = Path(factory.make_model(tmp_path, kind, num_hidden_layers=2))
    base = json.loads((folder / "config.json").read_text())
    tie = "tie_word_embeddings"
    changes = [({tie: outer}, {tie: inner}) for outer, inner in itertools.product((ABSENT, True, False), repeat=2)]
    changes += [({key: other(value)}, {}) for key, value in base["text_config"].items() if key not in base]
    verdicts = []
    for outer, inner in changes if full_matrix else changes[factory.KINDS.index(kind) % 9 :: 9]:
        told = base | outer | {"text_config": base["text_config"] | inner}
        for part in (told, told["text_config"]):
            for key in [key for key, value in part.items() if value is ABSENT]:
                del part[key]
        (folder / "config.json").write_text(json.dumps(told))
        verdicts.append((outer, inner, judge(folder, {*outer})))
    print(kind, dict(Counter(said for *_, said in verdicts)))
    assert not [entry for entry in verdicts if entry[-1] not in ("refused", "parity")]


@pytest.mark.parametrize("kind", PLAIN)
def test_flags_together(tmp_path, kind, full_matrix):
    """Many at once, of those that are not refused alone: with windows or not, tied or not, and so on."""
    folder = Path(factory.make_model(tmp_path, kind, num_hidden_layers=2))
    base = json.loads((folder / "config.json").read_text())
    served = {}
    for key, value in flags_of(base, transformers.CONFIG_MAPPING[base["model_type"]]).items():
        write(folder, base, {key: value})
        if refusal(folder) is None and {key: value} not in FAILS:
            served[key] = value
    rng = random.Random(kind)
    subsets = [[key for key in served if rng.random() < 0.5] for _ in range(24 if full_matrix else 0)]
    verdicts = []
    for keys in (list(served), *subsets):
        change = {key: served[key] for key in keys}
        verdicts.append((change, verdict(folder, base, "flags", change)))
    print(kind, list(served), dict(Counter(said for _, said in verdicts)))
    assert not [entry for entry in verdicts if entry[1] not in ("refused", "parity")]


@pytest.mark.parametrize("kind", PLAIN)
def test_keys_of_other_models(tmp_path, kind):
    """Most are refused; the others, served one by one, are at parity together."""
    folder = Path(factory.make_model(tmp_path, kind, num_hidden_layers=2))
    base = json.loads((folder / "config.json").read_text())
    text = text_of(base)
    foreign = foreign_changes(text, transformers.CONFIG_MAPPING[text["model_type"]])
    served = {}
    for key, value in foreign.items():
        write(folder, base, {key: value})
        told = refusal(folder)
        assert told is None or key in told
        served |= {key: value} if told is None else {}
    print(kind, {"refused": len(foreign) - len(served), "parity": len(served)})
    assert verdict(folder, base, "", served) == "parity"
