"""Experts of 4 bits and many tokens: some at a time dequantised, and multiplied by the kernel for weights in 16."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.closeness import check_close
from support.quantised_experts import make_arguments, make_weight

from rayllm_kernels import dispatch, ops
from rayllm_kernels.device import INTERPRETER
from rayllm_kernels.experts.plans import HOPPER_ROWS
from rayllm_kernels.quantised import plans

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
# kind, inputs that share a scale, of int4: more than 1 if there are zero points
FORMATS = [("int4", 32, 1), ("int4", 64, 2), ("int4", None, 2), ("mxfp4", 32, 1)]


@pytest.fixture
def case(randn):
    """(tokens, experts, top_k, hidden, inner, dtype, format) -> as of `make_arguments`, and biases."""

    def make(tokens, num_experts, top_k, hidden, inner, dtype, how):
        arguments = make_arguments(randn, tokens, num_experts, top_k, hidden, inner, dtype, how)
        return arguments, (randn(num_experts, 2 * inner, dtype=dtype), randn(num_experts, hidden, dtype=dtype))

    return make


def multiply_in_torch(x, weight, bias, groups, top_k, activation, *, dtype, out=None):
    """`experts/hopper_kernel.multiply`, which the interpreter cannot run: SiLU, or no activation.

    x: rows in the order of places.
    """
    gated, pairs = activation[0] is not None, groups.order.shape[0]
    if out is None:
        out = torch.full((pairs, weight.shape[1] // (2 if gated else 1)), float("nan"), dtype=dtype)
    for expert, place, end in groups.tiles[:, : int(groups.num_tiles)].T.tolist():
        places = torch.arange(place, min(place + HOPPER_ROWS, end))
        pair = groups.order[places].long()
        rows = x[places].float()
        y = rows @ weight[expert].float().T + bias[expert].float()
        if gated:
            gate, up = y.chunk(2, -1)
            y = F.silu(gate) * up
        out[places if gated else pair] = y.to(dtype)
    return out, None


@pytest.mark.parametrize("how", FORMATS, ids=str)
def test_numbers_of_some_experts(randn, how):
    from rayllm_kernels.quantised.dequantised_experts import dequantise_experts

    weight = make_weight(randn(5, 24, 96), *how)
    out = torch.empty(2, 24, 96, dtype=torch.float16, device=weight.codes.device)
    dequantise_experts(weight, 2, out)
    check_close(out, torch.stack([weight.dequantised(expert) for expert in (2, 3)]).to(out.dtype))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernel itself")
@pytest.mark.parametrize("at_once", [1, 2, 5])
@pytest.mark.parametrize("owned", [None, ops.ExpertRange(2, 9)])
def test_every_expert_has_its_turn(case, monkeypatch, at_once, owned):
    from rayllm_kernels.experts import products_kernel

    (x, weights, experts, gate_up, down), biases = case(30, 9, 2, 64, 32, torch.float16, ("int4", 32, 2))
    count = 9 if owned is None else 5
    first = 0 if owned is None else owned.first
    own = [
        each._replace(**{name: getattr(each, name)[first : first + count] for name in ("codes", "scales", "zeros")})
        for each in (gate_up, down)
    ]
    own_biases = [each[first : first + count] for each in biases]
    monkeypatch.setattr(plans, "DEQUANTISED_EXPERTS_BYTES", 2 * 3 * 64 * 32 * at_once)
    monkeypatch.setattr(plans, "dequantised_experts_take", lambda *_: True)
    calls = []

    def multiply(x, weight, *arguments, **options):
        calls.append(len(weight))
        return multiply_in_torch(x, weight, *arguments, **options)

    monkeypatch.setattr(products_kernel._hopper, "multiply", multiply, raising=False)
    options = {"owned": owned, "gate_up_bias": own_biases[0], "down_bias": own_biases[1]}
    with dispatch.forced(triton=True):
        y = ops.experts_quantised(x, weights, experts, *own, **options)
    with dispatch.forced(triton=False):
        expected = ops.experts_quantised(x, weights, experts, *own, **options)
    check_close(y, expected, terms=200, slack=3)
    assert sum(calls) == 2 * count, "each in two products"
    assert max(calls) <= at_once


@pytest.mark.skipif(not ON_HOPPER, reason="the products are by a kernel for Hopper")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("how", FORMATS, ids=str)
@pytest.mark.parametrize("parts", [1, 3])
def test_values(case, monkeypatch, dtype, how, parts):
    if how[0] == "mxfp4" and dtype == torch.float16:
        pytest.skip("exponents are those of bf16")
    from rayllm_kernels.quantised import dequantised_experts

    arguments, biases = case(2000, 7, 2, 192, 256, dtype, how)
    monkeypatch.setattr(plans, "DEQUANTISED_EXPERTS_BYTES", -(-2 * 7 * 3 * 192 * 256 // parts))
    options = {"gate_up_bias": biases[0], "down_bias": biases[1]}
    parts_written = []

    def write(weight, first, out, write=dequantised_experts.dequantise_experts):
        parts_written.append(first)
        return write(weight, first, out)

    monkeypatch.setattr(dequantised_experts, "dequantise_experts", write)
    monkeypatch.setattr(plans, "LEAST_DEQUANTISED_PAIRS", 500)  # of 2000 tokens' 571
    y = ops.experts_quantised(*arguments, **options)
    assert len(parts_written) == 2 * parts
    monkeypatch.setattr(plans, "LEAST_DEQUANTISED_PAIRS", float("inf"))
    expected = ops.experts_quantised(*arguments, **options)
    assert len(parts_written) == 2 * parts
    # Weights are rounded with their scales.
    assert (y.float() - expected.float()).norm() <= 0.005 * expected.float().norm()


def test_what_is_dequantised():
    hopper = INTERPRETER._replace(capability=(9, 0))
    least = plans.LEAST_DEQUANTISED_PAIRS
    for kind, dtype, fits in (
        ("int4", torch.bfloat16, True),
        ("int4", torch.float16, True),
        ("int4", torch.float32, False),
        ("mxfp4", torch.bfloat16, True),
        ("mxfp4", torch.float16, False),
        ("fp8", torch.bfloat16, False),
    ):
        assert plans.dequantised_experts_take(kind, 96, least, dtype, hopper) == fits
    for inputs, pairs, gpu in ((92, least, hopper), (96, least - 1, hopper), (96, least, INTERPRETER)):
        assert not plans.dequantised_experts_take("int4", inputs, pairs, torch.bfloat16, gpu)
