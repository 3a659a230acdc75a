"""Experts with weights in fewer bits, made of any floats."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rayllm_kernels.ops import ExpertWeight
from rayllm_kernels.quantised.formats import e2m1_numbers, e4m3_numbers, int4_numbers
from rayllm_kernels.quantised.int4 import pack_int4


def pack_halves(codes, half):
    codes = F.pad(codes, (0, 2 * half - codes.shape[-1]))
    return codes[..., :half] | codes[..., half:] << 4


def make_arguments(randn, tokens, num_experts, top_k, hidden, inner, dtype, how):
    """The arguments of `ops.experts_quantised` to `down`. how: as of `make_weight`, from `kind` on."""
    x = randn(tokens, hidden + 8, dtype=dtype)[:, :hidden]
    gate_up = make_weight(randn(num_experts, 2 * inner, hidden).mul_(2 * hidden**-0.5), *how)
    down = make_weight(randn(num_experts, hidden, inner).mul_(inner**-0.5), *how)
    weights, experts = randn(tokens, num_experts).softmax(-1).topk(top_k)
    return x, weights.contiguous(), experts.to(torch.int32), gate_up, down


def make_weight(weight, kind, group, rows):
    """[E, N, K] of any floats in fewer bits."""
    inputs = weight.shape[2]
    if kind == "mxfp4":
        codes, scales = e2m1_numbers(weight)
        half = -(-inputs // 64) * 32
        return ExpertWeight(kind, pack_halves(codes, half), scales, None, inputs, 32)
    found = []
    for each in weight:
        if kind == "fp8":
            numbers = e4m3_numbers(each, (rows, group))
            scales = numbers.scales[::rows][:, numbers.groups[:: group or inputs]]
            found.append((numbers.values.view(torch.uint8), scales, scales))
        else:
            found.append(pack_int4(int4_numbers(each, group, symmetric=rows == 1), group))
    codes, scales, zeros = (torch.stack(parts).contiguous() for parts in zip(*found, strict=True))
    zeros = zeros if kind == "int4" and rows > 1 else None
    return ExpertWeight(kind, codes, scales, zeros, inputs, group, rows if kind == "fp8" else 1)
