"""4 bits: the layout, and products against float64 of the dequantised weights."""

from __future__ import annotations

import pytest
import torch
from support.capabilities import HERE
from support.closeness import check_close

from rayllm_kernels.linear.plans import Tiles
from rayllm_kernels.ops import Int4Weight
from rayllm_kernels.quantised import plans
from rayllm_kernels.quantised.formats import int4_numbers
from rayllm_kernels.quantised.int4 import half_of, pack_int4

ON_GPU = torch.cuda.is_available()


def make_weight(weight, group, *, symmetric):
    codes, scales, zeros = pack_int4(int4_numbers(weight, group, symmetric=symmetric), group)
    return Int4Weight(codes, scales.contiguous(), None if symmetric else zeros.contiguous(), weight.shape[1], group)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("inputs", "group"), [(64, 32), (96, 32), (100, 32), (30, None), (31, None), (600, 128)])
def test_layout(randn, inputs, group, symmetric):
    """Nothing is lost, whatever the halves are filled up with."""
    numbers = int4_numbers(randn(5, inputs), group, symmetric=symmetric)
    weight = make_weight(randn(5, inputs), group, symmetric=symmetric)
    codes, scales, zeros = pack_int4(numbers, group)
    assert codes.shape == (5, half_of(inputs, group))
    assert half_of(inputs, group) % (group or 1) == 0
    packed = weight._replace(codes=codes, scales=scales, zeros=None if symmetric else zeros)
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
        with pytest.raises(ValueError, match=f"^{name} "):
            each.linear_int4(**({"x": x, "weight": weight} | change))
