"""4 bits: the layout, and products against float64 of the dequantised weights."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support.capabilities import HERE
from support.closeness import check_close

from rayllm_kernels.linear.plans import Tiles
from rayllm_kernels.ops import Int4Weight
from rayllm_kernels.quantised import plans
from rayllm_kernels.quantised.dequantised_product import linear_dequantised
from rayllm_kernels.quantised.formats import int4_numbers
from rayllm_kernels.quantised.int4 import half_of, pack_int4

ON_GPU = torch.cuda.is_available()


def make_weight(weight, group, *, symmetric):
    codes, scales, zeros = pack_int4(int4_numbers(weight, group, symmetric=symmetric), group)
    zeros = None if symmetric else zeros.T.contiguous()
    return Int4Weight(codes, scales.T.contiguous(), zeros, weight.shape[1], group)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("inputs", "group"), [(64, 32), (96, 32), (100, 32), (30, None), (31, None), (600, 128)])
def test_layout(randn, inputs, group, symmetric):
    """Nothing is lost, whatever the halves are filled up with."""
    numbers = int4_numbers(randn(5, inputs), group, symmetric=symmetric)
    weight = make_weight(randn(5, inputs), group, symmetric=symmetric)
    codes, scales, zeros = pack_int4(numbers, group)
    assert codes.shape == (5, half_of(inputs, group))
    assert half_of(inputs, group) % (group or 1) == 0
    packed = weight._replace(codes=codes, scales=scales.T, zeros=None if symmetric else zeros.T)
    assert torch.equal(packed.dequantised(), numbers.dequantised())


# tokens, outputs, inputs, group
SHAPES = [(1, 33, 130, None), (3, 40, 96, 32), (19, 72, 256, 64), (70, 24, 300, 128), (5, 17, 64, 32)]
if ON_GPU:
    SHAPES += [(m, 4096, 1024, group) for m in (1, 16, 100, 500) for group in (32, 128)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16] + [torch.bfloat16] * ON_GPU)
@pytest.mark.parametrize(("tokens", "outputs", "inputs", "group"), SHAPES)
@pytest.mark.parametrize("symmetric", [True, False])
def test_products(randn, scaled, kernels, reference, tokens, outputs, inputs, group, symmetric, dtype):
    weight = make_weight(scaled(outputs, inputs, torch.float32), group, symmetric=symmetric)
    x, bias = 3 * randn(tokens, inputs + 1, dtype=dtype)[:, 1:], randn(outputs, dtype=dtype)
    expected = x.double() @ weight.dequantised().double().T
    for each in (reference, kernels):
        check_close(each.linear_int4(x, weight), expected.to(dtype), terms=inputs)
        fixed = each.linear_int4(x, weight, bias, deterministic=True)
        check_close(fixed, (expected + bias.double()).to(dtype), terms=inputs)


TILES = {
    plans.choose_int4_tiles(tokens, outputs, group, torch.float16, HERE._replace(multiprocessors=count))
    for tokens in (1, 17, 40, 70, 129)
    for outputs in (16, 9000)
    for group in (None, 32, 128)
    for count in (1, 132)
}


@pytest.mark.parametrize("tiles", sorted(TILES), ids=str)
def test_every_tile_that_may_be_chosen(randn, scaled, tiles: Tiles):
    from rayllm_kernels.quantised.int4_product_kernel import multiply

    tokens, outputs, inputs = min(tiles.tokens, 20) + 1, 40, 2 * tiles.depth + 48
    for group in {None, 32, 64, 128}:
        if group is not None and group % (tiles.depth // tiles.slices):
            continue
        weight = make_weight(scaled(outputs, inputs, torch.float32), group, symmetric=group == 64)
        x = randn(tokens, inputs, dtype=torch.float16)
        expected = x.double() @ weight.dequantised().double().T
        check_close(multiply(x, weight, None, tiles), expected.half(), terms=inputs)


# outputs, inputs, group
ONE_TOKEN = [(37, 96, 32), (22, 320, 64), (5, 1000, 128), (18, 96, None), (6, 100, None), (6, 32, 32), (9, 544, 32)]
if ON_GPU:
    ONE_TOKEN += [(6144, 4096, 128), (4095, 14336, 128), (514, 16384, 64)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("outputs", "inputs", "group"), ONE_TOKEN)
@pytest.mark.parametrize("symmetric", [True, False])
def test_one_token(randn, scaled, kernels, reference, outputs, inputs, group, symmetric, dtype):
    """With a norm before it and the activation behind it, in one launch; several tokens take several."""
    weight = make_weight(scaled(outputs, inputs, torch.float32), group, symmetric=symmetric)
    wide, silu = weight.dequantised().double().T, torch.nn.functional.silu
    bias, norm = randn(outputs, dtype=dtype), (randn(inputs, dtype=dtype), 1e-5)
    fits = plans.int4_vector_takes(randn(1, inputs), weight.codes)
    assert fits == (inputs != 100)
    for tokens in (1, 3):
        x, residual = 3 * randn(tokens, inputs + 1, dtype=dtype)[:, 1:], randn(tokens, inputs, dtype=dtype)
        for before in (None, residual):
            sum_ = x if before is None else x + before
            normed = sum_.double() * torch.rsqrt(sum_.double().square().mean(1, keepdim=True) + norm[1]) * norm[0]
            expected = normed @ wide
            for each in (reference, kernels):
                y, total = each.fused_linear_int4(x, weight, bias, norm=norm, residual=before)
                check_close(y, (expected + bias.double()).to(dtype), terms=inputs)
                assert total is x if before is None else torch.equal(total, sum_)
                if outputs % 2 == 0:
                    gate, up = expected.chunk(2, dim=1)
                    y, total = each.fused_linear_int4(x, weight, norm=norm, residual=before, act="silu")
                    # By several launches the norm, gate and up are rounded.
                    slack = 1.0 if each is kernels and tokens == 1 and fits else 3.0
                    check_close(y, (silu(gate) * up).to(dtype), terms=inputs, slack=slack)
        for each in (reference, kernels):
            y, total = each.fused_linear_int4(x, weight, bias)
            assert total is x
            check_close(y, (x.double() @ wide + bias.double()).to(dtype), terms=inputs)


@pytest.mark.parametrize("size", [1e-12, 1e-3, 1e4, 1e12])
def test_one_token_of_any_size(randn, scaled, kernels, size):
    """Numbers are denormal, products are not."""
    weight, x = make_weight(scaled(33, 160, torch.float32), 32, symmetric=False), size * randn(1, 160)
    check_close(kernels.linear_int4(x, weight), (x.double() @ weight.dequantised().double().T).float(), terms=160)
    norm = (randn(160), 0.0)
    y, _ = kernels.fused_linear_int4(x, weight, norm=norm)
    normed = x.double() * torch.rsqrt(x.double().square().mean()) * norm[0]
    check_close(y, (normed @ weight.dequantised().double().T).float(), terms=160)


def test_every_number_at_every_place(kernels, device):
    """Of each word, alone."""
    inputs = 64
    codes = torch.zeros(16 * inputs, inputs // 2, dtype=torch.uint8, device=device)
    for number in range(16):
        for k in range(inputs):
            codes[number * inputs + k, k % (inputs // 2)] = number << 4 * (k // (inputs // 2))
    scales = torch.ones(1, 16 * inputs, device=device)
    weight = Int4Weight(codes, scales, torch.zeros_like(scales, dtype=torch.uint8), inputs, None)
    x = torch.arange(1.0, inputs + 1, device=device)[None]
    expected = torch.arange(16.0, device=device)[:, None] * x
    assert torch.equal(kernels.linear_int4(x, weight), expected.view(1, -1))


@pytest.mark.parametrize("choice", [(1, 1, 1), (2, 1, 3), (4, 2, 2), (8, 4, 1)])
@pytest.mark.parametrize("act", [None, "silu"])
def test_programs_share_one_token_s_tiles(randn, scaled, choice, act):
    """One tile each, some more than others, or one program all of them."""
    from rayllm_kernels.quantised.int4_vector_kernel import linear_int4_vector

    weight, x = make_weight(scaled(26, 192, torch.float32), 64, symmetric=True), randn(1, 192)
    y, _ = linear_int4_vector(x, (None, None, 0.0), weight, None, act, choice=choice)
    expected = x.double() @ weight.dequantised().double().T
    if act:
        gate, up = expected.chunk(2, dim=1)
        expected = torch.nn.functional.silu(gate) * up
    check_close(y, expected.float(), terms=192)


def test_rows_do_not_know_of_other_rows(randn, scaled, assert_rows_independent, reference):
    weight, x = make_weight(scaled(24, 64, torch.float32), 32, symmetric=False), randn(201, 64)
    assert_rows_independent(lambda x: (reference.linear_int4(x, weight, deterministic=True),), x)


def test_no_tokens(randn, each):
    assert each.linear_int4(randn(0, 64), make_weight(randn(16, 64), 32, symmetric=True)).shape == (0, 16)


def test_errors(randn, each):
    weight, x = make_weight(randn(16, 64), 32, symmetric=False), randn(2, 64)
    calls = [
        ("x", {"x": randn(2, 32)}),
        ("weight.group", {"weight": weight._replace(group=48)}),
        ("weight.codes", {"weight": weight._replace(codes=weight.codes.int())}),
        ("weight.codes", {"weight": weight._replace(codes=weight.codes[:, :8])}),
        ("weight.scales", {"weight": weight._replace(scales=weight.scales.half())}),
        ("weight.zeros", {"weight": weight._replace(zeros=weight.zeros[:1])}),
        ("bias", {"bias": randn(15)}),
    ]
    for name, change in calls:
        for op in (each.linear_int4, each.fused_linear_int4):
            with pytest.raises(ValueError, match=f"^{name} "):
                op(**({"x": x, "weight": weight} | change))
    for name, change in (
        ("weight", {"bias": randn(16), "act": "silu"}),
        ("act", {"act": "none"}),
        ("norm", {"norm": (randn(32), 1e-5)}),
        ("residual", {"norm": (randn(64), 1e-5), "residual": x[:1]}),
        ("residual", {"residual": x}),
    ):
        with pytest.raises(ValueError, match=f"^{name} "):
            each.fused_linear_int4(x, weight, **change)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("outputs", "inputs", "group"), [(140, 96, 32), (33, 300, 128), (21, 31, None), (9, 1100, 64)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_by_dequantised_weights(randn, scaled, monkeypatch, outputs, inputs, group, symmetric, dtype):
    """All at once, and in parts."""
    from rayllm_kernels.quantised.dequantise_kernel import dequantise

    weight = make_weight(scaled(outputs, inputs, torch.float32), group, symmetric=symmetric)
    out = torch.empty(outputs - 4, inputs, dtype=dtype, device=weight.codes.device)
    dequantise(weight, 4, out)
    check_close(out, weight.dequantised()[4:].to(dtype))
    x, bias = randn(5, inputs, dtype=dtype), randn(outputs, dtype=dtype)
    expected = x.double() @ weight.dequantised().double().T
    for size in (plans.DEQUANTISED_BYTES, 1):
        monkeypatch.setattr(plans, "DEQUANTISED_BYTES", size)
        y = linear_dequantised(x, outputs, None, partial(dequantise, weight))
        check_close(y, expected.to(dtype), terms=inputs)
        y = linear_dequantised(x, outputs, bias, partial(dequantise, weight))
        check_close(y, (expected + bias.double()).to(dtype), terms=inputs)
