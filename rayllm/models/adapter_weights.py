"""An adapter's matrices: from PEFT's adapter_model.safetensors to what one rank's projections have of them."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from rayllm.config.lora import WEIGHTS_FILE, LoraConfig, adapter_digest, read_lora_config
from rayllm.errors import ModelError
from rayllm.layers.lora import Adaptable, HostMatrices, ProjectionAdapters
from rayllm.models.base import CausalLM
from rayllm.models.text_only import text_name

logger = logging.getLogger(__name__)

_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")


class ProjectionMatrices(NamedTuple):
    """What one projection has of an adapter, in host memory. ranks: [modules] int32, 0 for those without matrices."""

    projection: ProjectionAdapters
    matrices: list[HostMatrices]
    ranks: torch.Tensor


class _Pair(NamedTuple):
    """A module's matrices, "A" and "B", and what the adapter calls the module."""

    module: str
    tensors: dict[str, torch.Tensor]


def read_adapter(model: CausalLM, folder: str, digest: str) -> list[ProjectionMatrices]:
    """The rank's part of an adapter, in the model's dtype and, on CUDA, in pinned memory: of all of its projections.

    digest: what `adapter_digest` must be. Raises ModelError, naming the tensor or the key at fault.
    """
    config = read_lora_config(folder)
    if adapter_digest(folder) != digest:
        raise ModelError(f"adapter folder {folder} has other contents here than where it was loaded first")
    pairs = _read_pairs(config, text_only=model.spec.text_only)
    weight = model.lm_head.weight
    dtype, pinned = weight.dtype, weight.device.type == "cuda"
    modules = {module.name for projection in model.projection_adapters for module in projection.modules}
    if unknown := sorted(pairs.keys() - modules):
        raise ModelError(
            f"{folder}: {pairs[unknown[0]].module} is adapted, and the model has no attention or dense projection of "
            "that name; embeddings, heads, experts and routers are not supported"
        )
    found = []
    for projection in model.projection_adapters:
        matrices, ranks = [], torch.zeros(len(projection.modules), dtype=torch.int32)
        for number, module in enumerate(projection.modules):
            if (pair := pairs.get(module.name)) is None:
                continue
            a, b = _checked(config, module, pair, projection.state.max_rank)
            a = a[:, module.columns].to(dtype, copy=True).contiguous()
            b = (module.rows(b).float() * config.scale(pair.module)).to(dtype).contiguous()
            if not a.isfinite().all():
                raise ModelError(f"{folder}: {pair.module}.lora_A.weight is not finite in {dtype}")
            if not b.isfinite().all():  # products add all slots' B times zero, but for a token's own
                raise ModelError(f"{folder}: {pair.module}.lora_B.weight is not finite, times alpha / r, in {dtype}")
            ranks[number] = a.shape[0]
            matrices.append(HostMatrices(number, *((a.pin_memory(), b.pin_memory()) if pinned else (a, b))))
        found.append(ProjectionMatrices(projection, matrices, ranks.pin_memory() if pinned else ranks))
    return found


def _read_pairs(config: LoraConfig, *, text_only: bool) -> dict[str, _Pair]:
    """By the modules' names in the model.

    text_only: the adapter may be of a model with towers, which computes text without what it has for these.
    """
    file = Path(config.folder, WEIGHTS_FILE)
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"weights file {file} is damaged: {error}") from None
    pairs: dict[str, _Pair] = {}
    left_out = 0
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None:
            raise ModelError(f"{file}: {name} is not supported; only lora_A and lora_B of linear layers are")
        if not config.is_target(match[1]):
            raise ModelError(f"{file}: {name} is of a module that target_modules does not name")
        module = text_name(match[1]) if text_only else match[1]
        if module is None:
            left_out += 1
            continue
        pair = pairs.setdefault(module, _Pair(match[1], {}))
        if pair.module != match[1]:
            raise ModelError(f"{file}: {match[1]} and {pair.module} are the same module")
        pair.tensors[match[2]] = tensor
    if left_out:
        logger.info("%s: %d weights of towers for images or sound are left out", config.folder, left_out)
    if not pairs:
        raise ModelError(f"{file} has no weights" + (" of the text model" if left_out else ""))
    return pairs


def _checked(config: LoraConfig, module: Adaptable, pair: _Pair, max_rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    rank, where, tensors = config.rank(pair.module), f"{config.folder}: {pair.module}", pair.tensors
    if rank > max_rank:
        raise ModelError(f"{where} has rank {rank}, and max_lora_rank is {max_rank}")
    for name, shape in (("A", (rank, module.inputs)), ("B", (module.outputs, rank))):
        if name not in tensors:
            raise ModelError(f"{where}.lora_{name}.weight is missing")
        if tuple(tensors[name].shape) != shape or not tensors[name].is_floating_point():
            stored = f"{list(tensors[name].shape)} of {tensors[name].dtype}"
            raise ModelError(f"{where}.lora_{name}.weight is {stored}, but must be {list(shape)} of floats")
    return tensors["A"], tensors["B"]
