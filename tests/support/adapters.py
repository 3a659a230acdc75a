"""Adapters in PEFT's form for tiny models, and what a model computes with one: the product merged into its weights."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from support.yardstick import transformers_model

LLAMA_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
DELTA_LINEARS = (*LLAMA_LINEARS, "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
GROUPED_DELTA_LINEARS = (*LLAMA_LINEARS, "in_proj_qkvz", "in_proj_ba", "out_proj")
# But for those that latent attention takes apart.
LATENT_LINEARS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "gate_proj", "up_proj", "down_proj")
GEMMA4_LINEARS = (*LLAMA_LINEARS, "per_layer_input_gate", "per_layer_projection", "per_layer_model_projection")


def make_adapter(
    folder: str | Path,
    model: str,
    *,
    rank: int = 8,
    targets: Sequence[str] | str = LLAMA_LINEARS,
    seed: int = 0,
    size: float = 0.3,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> str:
    """Write a seeded adapter for all linear layers of `model` that targets name, towers' too; returns the folder.

    config: more of adapter_config.json. size: of the product, as a share of the model's own weights.
    """
    base = transformers_model(model)
    told = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": targets, "bias": "none", **config}
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in base.named_modules():
        if not isinstance(module, torch.nn.Linear) or not _is_target(name, targets) or name == "lm_head":
            continue
        own, (outputs, inputs) = _by_pattern(told, "rank_pattern", name, rank), module.weight.shape
        weight = module.weight.std().item()
        a = torch.randn(own, inputs, generator=generator) * inputs**-0.5
        b = (
            torch.randn(outputs, own, generator=generator)
            * (size * weight * (inputs / own) ** 0.5)
            / _scale(told, name)
        )
        tensors[f"base_model.model.{name}.lora_A.weight"] = a.to(dtype)
        tensors[f"base_model.model.{name}.lora_B.weight"] = b.to(dtype)
    Path(folder).mkdir(parents=True, exist_ok=True)
    Path(folder, "adapter_config.json").write_text(json.dumps(told))
    save_file(tensors, Path(folder, "adapter_model.safetensors"))
    return str(folder)


def edit_config(folder: str, **fields: Any) -> None:
    """Change fields of adapter_config.json."""
    file = Path(folder, "adapter_config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@contextmanager
def merged(model: torch.nn.Module, folder: str | None) -> Iterator[torch.nn.Module]:
    """A model of transformers with an adapter's products added to its weights."""
    if folder is None:
        yield model
        return
    told = json.loads(Path(folder, "adapter_config.json").read_text())
    tensors = load_file(Path(folder, "adapter_model.safetensors"))
    before = {}
    for key, a in tensors.items():
        if key.endswith("lora_A.weight"):
            name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            b = tensors[key.replace("lora_A", "lora_B")]
            weight = model.get_submodule(name).weight.data
            before[name] = weight.clone()
            weight += (b.to(weight.dtype) @ a.to(weight.dtype)) * _scale(told, name)
    yield model
    for name, weight in before.items():
        model.get_submodule(name).weight.data.copy_(weight)


@torch.no_grad()
def greedy(model: torch.nn.Module, prompts: list[list[int]], count: int) -> list[list[int]]:
    """So many tokens after each prompt, by the whole model each time; the prompts are of one length."""
    ids = torch.tensor(prompts)
    cache = None
    new = ids
    for _ in range(count):
        out = model(new, past_key_values=cache, use_cache=True)
        cache, new = out.past_key_values, out.logits[:, -1:].argmax(-1)
        ids = torch.cat([ids, new], 1)
    return ids[:, len(prompts[0]) :].tolist()


def _is_target(name: str, targets: Sequence[str] | str) -> bool:
    if isinstance(targets, str):
        return targets == "all-linear" or re.fullmatch(targets, name) is not None
    return any(name == each or name.endswith("." + each) for each in targets)


def _by_pattern(told: dict[str, Any], key: str, name: str, default: float) -> Any:
    """As PEFT finds it: by the first pattern that the end of the name matches."""
    found = [v for k, v in told.get(key, {}).items() if re.match(rf"(.*\.)?({k})$", name)]
    return found[0] if found else default


def _scale(told: dict[str, Any], name: str) -> float:
    rank = _by_pattern(told, "rank_pattern", name, told["r"])
    alpha = _by_pattern(told, "alpha_pattern", name, told["lora_alpha"])
    return alpha / (math.sqrt(rank) if told.get("use_rslora") else rank)
