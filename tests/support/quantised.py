"""Weights in fewer bits, written in numpy from the definitions of the formats, and tiny checkpoints of them.

A writer takes a weight [out, in] and gives (the tensors of its module by their last names, the weight that these mean
in float32).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Array = np.ndarray
Written = tuple[dict[str, torch.Tensor], Array]


def _e4m3_values() -> Array:
    """What each byte means, NaN for 127 and 255."""
    values = []
    for byte in range(256):
        sign, exponent, mantissa = byte >> 7, byte >> 3 & 15, byte & 7
        size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        values.append(np.nan if byte & 127 == 127 else -size if sign else size)
    return np.array(values, np.float32)


E4M3 = _e4m3_values()
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def nearest(values: Array, table: Array) -> Array:
    """The index in `table` of the number next to each of `values`."""
    order = np.argsort(table, kind="stable")
    order = order[np.isfinite(table[order])]
    known = table[order]
    return order[np.searchsorted((known[1:] + known[:-1]) / 2, values)]


def cells(shape: tuple[int, ...], block: tuple[int, int]) -> list[tuple[int, int, slice, slice]]:
    """(row and column of a block, its rows, its columns) of all blocks."""
    return [
        (i, j, slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
        for i in range(-(-shape[0] // block[0]))
        for j in range(-(-shape[1] // block[1]))
    ]


def fp8(weight: Array, block: tuple[int, int], name: str = "weight_scale_inv", shape: Any = None) -> Written:
    rows, columns = (-(-size // step) for size, step in zip(weight.shape, block, strict=True))
    codes, meant, scales = (
        np.zeros(weight.shape, np.uint8),
        np.zeros_like(weight),
        np.zeros((rows, columns), np.float32),
    )
    for i, j, *where in cells(weight.shape, block):
        part = weight[tuple(where)]
        scales[i, j] = np.abs(part).max() / np.float32(448)
        codes[tuple(where)] = nearest(part / scales[i, j], E4M3)
        meant[tuple(where)] = E4M3[codes[tuple(where)]] * scales[i, j]
    stored = torch.from_numpy(scales if shape is None else scales.reshape(shape))
    return {"weight": torch.from_numpy(codes).view(torch.float8_e4m3fn), name: stored}, meant


def int8(weight: Array, *, symmetric: bool) -> Written:
    """A scale a row; signed numbers, around a zero point or not."""
    low, high = weight.min(1, keepdims=True), weight.max(1, keepdims=True)
    if symmetric:
        scales, zeros = np.maximum(-low, high) / np.float32(127), np.zeros_like(low)
    else:
        scales = (high - low) / np.float32(255)
        zeros = np.round(-128 - low / scales)
    numbers = np.clip(np.round(weight / scales) + zeros, -128, 127)
    tensors = {"weight": torch.from_numpy(numbers.astype(np.int8)), "weight_scale": torch.from_numpy(scales)}
    if not symmetric:
        tensors["weight_zero_point"] = torch.from_numpy(zeros.astype(np.int8))
    return tensors, (numbers - zeros) * scales


def quantise_groups(
    weight: Array, group: int, bits: int, *, symmetric: bool, shuffled: bool = False
) -> tuple[Array, Array, Array, Array, Array]:
    """(numbers [N, K] from 0, scales in float16 and zero points [N, G], groups [K], the weight that these mean)."""
    num_rows, num_columns = weight.shape
    group = num_columns if group == -1 else group
    groups = np.arange(num_columns) // group
    if shuffled:
        groups = np.random.default_rng(0).permutation(groups)
    top, count = 2**bits - 1, groups.max() + 1
    scales, zeros = np.zeros((num_rows, count), np.float16), np.zeros((num_rows, count), np.int64)
    numbers, meant = np.zeros(weight.shape, np.int64), np.zeros_like(weight)
    for g in range(count):
        inputs = groups == g
        part = weight[:, inputs]
        if symmetric:
            scales[:, g], zeros[:, g] = np.abs(part).max(1) / (top // 2), 2 ** (bits - 1)
        else:
            low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
            scales[:, g] = (high - low) / top
            zeros[:, g] = np.clip(np.round(-low / scales[:, g].astype(np.float32)), 0, top)
        scale, zero = scales[:, g, None].astype(np.float32), zeros[:, g, None]
        numbers[:, inputs] = np.clip(np.round(part / scale) + zero, 0, top)
        meant[:, inputs] = scale * (numbers[:, inputs] - zero)
    return numbers, scales, zeros, groups, meant


def words(numbers: Array, bits: int, axis: int, order: tuple[int, ...] | None = None) -> Array:
    """int32 words of 32 / bits neighbours along `axis`, filled up with zeros; order: which neighbour goes first."""
    numbers, count = np.moveaxis(numbers, axis, -1), 32 // bits
    numbers = np.pad(numbers, [(0, 0), (0, -numbers.shape[-1] % count)]).astype(np.uint64)
    packed = np.zeros((numbers.shape[0], numbers.shape[1] // count), np.uint64)
    for place, neighbour in enumerate(order or range(count)):
        packed |= numbers[:, neighbour::count] << np.uint64(bits * place)
    return np.ascontiguousarray(np.moveaxis(packed.astype(np.uint32).view(np.int32), -1, axis))


def packed(weight: Array, group: int, bits: int, *, symmetric: bool, shuffled: bool = False) -> Written:
    """pack-quantized of compressed-tensors."""
    numbers, scales, zeros, groups, meant = quantise_groups(weight, group, bits, symmetric=symmetric, shuffled=shuffled)
    tensors = {"weight_packed": words(numbers, bits, 1), "weight_scale": scales, "weight_shape": np.array(weight.shape)}
    if not symmetric:
        tensors["weight_zero_point"] = words(zeros, bits, 0)
    if shuffled:
        tensors["weight_g_idx"] = groups.astype(np.int32)
    return {name: torch.from_numpy(array) for name, array in tensors.items()}, meant


def gptq(
    weight: Array, group: int, bits: int, *, symmetric: bool, shuffled: bool = False, first_form: bool = True
) -> Written:
    numbers, scales, zeros, groups, meant = quantise_groups(weight, group, bits, symmetric=symmetric, shuffled=shuffled)
    stored = words(zeros.T, bits, 1).view(np.uint32)
    if first_form:
        stored = stored - np.uint32(sum(2**place for place in range(0, 32, bits)))
    tensors = {
        "qweight": words(numbers.T, bits, 0),
        "qzeros": stored.view(np.int32),
        "scales": np.ascontiguousarray(scales.T),
        "g_idx": groups.astype(np.int32),
        "bias": np.zeros(len(weight), np.float16),  # AutoGPTQ writes one for every projection
    }
    return {name: torch.from_numpy(array) for name, array in tensors.items()}, meant


def awq(weight: Array, group: int) -> Written:
    numbers, scales, zeros, _, meant = quantise_groups(weight, group, 4, symmetric=False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        "qweight": words(numbers.T, 4, 1, order),
        "qzeros": words(zeros.T, 4, 1, order),
        "scales": np.ascontiguousarray(scales.T),
    }
    return {name: torch.from_numpy(array) for name, array in tensors.items()}, meant


def mxfp4(weight: Array) -> tuple[torch.Tensor, torch.Tensor, Array]:
    """[..., K] -> (blocks [..., K / 32, 16], scales [..., K / 32], the weight that these mean)."""
    parts = weight.reshape(*weight.shape[:-1], -1, 32)
    exponents = np.floor(np.log2(np.abs(parts).max(-1))).astype(np.int64) - 2
    codes = nearest(parts / np.exp2(exponents)[..., None], E2M1).astype(np.uint8)
    meant = E2M1[codes] * np.exp2(exponents.astype(np.float32))[..., None]
    blocks = codes[..., 0::2] | codes[..., 1::2] << 4
    return torch.from_numpy(blocks), torch.from_numpy((exponents + 127).astype(np.uint8)), meant.reshape(weight.shape)


def quantise(
    folder: Path, config: dict[str, Any], write: Callable[[Array], Written], ends: tuple[str, ...] = ("_proj.weight",)
) -> Path:
    """Turn the weights in `folder` whose names end so into fewer bits; `plain` beside it has what these mean.

    config: the quantization_config. Returns the folder of the plain one.
    """
    plain = folder.parent / (folder.name + "-plain")
    shutil.copytree(folder, plain, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    meaning = dict(tensors)
    for name in [name for name in tensors if name.endswith(ends)]:
        written, meant = write(tensors.pop(name).numpy())
        meaning[name] = torch.from_numpy(np.ascontiguousarray(meant, np.float32))
        module = name.removesuffix("weight")
        tensors = {module + last: tensor for last, tensor in written.items()} | tensors  # biases stay as they are
    save_file(tensors, folder / "model.safetensors")
    save_file(meaning, plain / "model.safetensors")
    set_config(folder, quantization_config=config)
    return plain


def set_config(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
