"""fp8: what activations are rounded to, and products, against float64 of the numbers that are multiplied."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support.capabilities import HERE, needs_e4m3
from support.closeness import check_close

from rayllm_kernels.device import assumed
from rayllm_kernels.linear.plans import Tiles
from rayllm_kernels.ops import Fp8Rows, Fp8Weight, Rounding
from rayllm_kernels.quantised import plans
from rayllm_kernels.quantised.dequantised_product import linear_dequantised
from rayllm_kernels.quantised.formats import e4m3_numbers

ON_GPU = torch.cuda.is_available()
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Hopper's tensor cores add fp8 products with fewer bits than fp32 has.
PRODUCT_DTYPES = DTYPES[1:] if ON_GPU else DTYPES
E4M3 = torch.float8_e4m3fn
# With conversions of e4m3, if there are any here, and without.
HARDWARE = [HERE] * HERE.has_e4m3 + [HERE._replace(capability=(8, 6))]


def make_weight(weight, rows=1, group=None):
    """As `Fp8Weight`, of any floats [N, K]."""
    found = e4m3_numbers(weight, (rows, group))
    scales = found.scales[::rows][:, found.groups[:: group or len(found.groups)]]
    return Fp8Weight(found.values.contiguous(), scales.contiguous(), rows, group)


def exact(x: Fp8Rows, weight: Fp8Weight):
    return x.dequantised().double() @ weight.dequantised().double().T


def check_codes(actual, expected, share=0.0):
    """Equal codes and scales, but for `share` of the codes, which are the next ones."""
    torch.testing.assert_close(actual.scales, expected.scales, rtol=1e-6 if share else 0, atol=0)
    assert actual.group == expected.group
    ours, theirs = actual.values.view(torch.uint8).int(), expected.values.view(torch.uint8).int()
    assert (ours != theirs).float().mean() <= share
    assert ((ours - theirs).abs() <= 1).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "group"), [(100, None), (100, 32), (512, 128), (9000, None), (1100, 64)])
def test_rounding(randn, kernels, reference, dim, group, dtype):
    """Scales map a group's largest number to 448; the kernel has the same codes, to the bit."""
    x = 3 * randn(5, dim + 3, dtype=dtype)[:, 1 : dim + 1]
    x[2] = 0.0
    x[3, : dim // 2] *= 1e-4
    found = reference.to_fp8(x, Rounding(group))
    assert found.values.dtype == E4M3
    assert found.scales.shape == (5, 1 if group is None else -(-dim // group))
    wide = found.dequantised()
    steps = found.scales if group is None else found.scales.repeat_interleave(group, 1)[:, :dim]
    assert ((wide - x.float()).abs() <= x.float().abs() * 2.0**-4 + steps * 2.0**-10 + 1e-30).all()
    assert not wide[2].any()
    torch.testing.assert_close(wide.abs().amax(1), x.float().abs().amax(1))
    check_codes(kernels.to_fp8(x, Rounding(group)), found)


@pytest.mark.parametrize("act", [None, "silu"])
def test_rows_longer_than_a_tile_are_read_twice(randn, kernels, reference, act):
    x = randn(3, 17000 * (1 if act is None else 2))
    found, expected = (
        each.to_fp8(x, Rounding()) if act is None else each.act_and_mul_fp8(x, Rounding(), act)
        for each in (kernels, reference)
    )
    check_codes(found, expected, 0.001 if act else 0.0)


def test_a_scale_found_beforehand(randn, kernels, reference, device):
    x = randn(4, 40)
    x[1, 2], x[1, 3] = 1e4, -1e4
    how = Rounding(None, torch.tensor([0.5], device=device))
    found = reference.to_fp8(x, how)
    assert found.scales.tolist() == [[0.5]] * 4
    assert found.dequantised()[1, 2:4].tolist() == [224.0, -224.0]
    check_codes(kernels.to_fp8(x, how), found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "group"), [(96, None), (96, 32), (1100, 128)])
@pytest.mark.parametrize("with_residual", [True, False])
def test_rms_norm_fp8(randn, kernels, reference, dim, group, with_residual, dtype):
    x, weight = 4 * randn(3, dim, dtype=dtype), randn(dim, dtype=dtype)
    residual = 5 * randn(3, dim + 1, dtype=dtype)[:, 1:] if with_residual else None
    how = Rounding(group)
    found, total = reference.rms_norm_fp8(x, residual, weight, 1e-5, how)
    apart = reference.rms_norm(total, weight, 1e-5)
    check_codes(found, reference.to_fp8(apart, how))
    torch.testing.assert_close(total, x if residual is None else x + residual, rtol=0, atol=0)
    ours, our_total = kernels.rms_norm_fp8(x, residual, weight, 1e-5, how)
    check_close(our_total, total)
    if ON_GPU or dtype != torch.bfloat16:  # which the interpreter truncates
        check_codes(ours, found, share=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("dim", "group"), [(80, None), (80, 32), (8300, None)])
def test_act_and_mul_fp8(randn, kernels, reference, dim, group, dtype):
    x, how, act = 2 * randn(3, 2 * dim, dtype=dtype), Rounding(group), "silu" if group is None else "gelu_new"
    found = reference.act_and_mul_fp8(x, how, act)
    check_codes(found, reference.to_fp8(reference.act_and_mul(x, act), how))
    check_codes(kernels.act_and_mul_fp8(x, how, act), found, share=0.01)


# tokens, outputs, inputs, outputs that share a scale, inputs that do
SHAPES = [(1, 33, 130, 1, None), (5, 40, 96, 1, None), (70, 24, 64, 1, None)]
SHAPES += [(1, 33, 130, 16, 128), (7, 40, 96, 1, 32), (19, 200, 300, 128, 128), (70, 72, 160, 8, 64)]
if ON_GPU:
    SHAPES += [(m, n, k, *b) for m in (1, 16, 100, 500) for n, k in ((4096, 1024),) for b in ((1, None), (128, 128))]


@needs_e4m3
@pytest.mark.parametrize(("dim", "act"), [(160, None), (1100, None), (160, "silu")])
def test_scales_group_by_group(randn, scaled, kernels, dim, act):
    """The same codes and scales in another order, with room for whole fours of tokens; products take them too."""
    from rayllm_kernels.quantised import fp8_rows_kernel

    how, norm, x = Rounding(32), randn(dim, dtype=torch.float16), randn(7, dim * 2, dtype=torch.float16)
    x = x if act else x[:, :dim]
    ways = [lambda **order: fp8_rows_kernel.to_fp8(x, how, act, **order)]
    if act is None:
        ways.append(lambda **order: fp8_rows_kernel.rms_norm_fp8(x, x, norm, 1e-5, how, **order)[0])
    weight = make_weight(scaled(24, dim, torch.float32), 8, 32)
    for way in ways:
        plain, found = way(), way(by_group=True)
        assert found.by_group
        assert not plain.by_group
        assert found.scales.stride() == (1, 8)
        assert found.values.untyped_storage().nbytes() >= 8 * dim
        assert torch.equal(found.scales, plain.scales)
        assert torch.equal(found.values.view(torch.uint8), plain.values.view(torch.uint8))
        for deterministic in (False, True):
            products = [
                kernels.linear_fp8(rows, weight, None, x.dtype, deterministic=deterministic) for rows in (plain, found)
            ]
            assert torch.equal(*products)


@pytest.mark.skipif(not HERE.is_hopper, reason="needs a Hopper GPU")
@pytest.mark.parametrize("tokens", [65, 66, 68, 127, 257, 1000])
@pytest.mark.parametrize(("outputs", "inputs"), [(576, 1024), (6144, 512), (4096, 3584), (8960, 512)])
def test_blocks_and_many_tokens(randn, scaled, kernels, tokens, outputs, inputs):
    """Any number of tokens, and outputs that end within a block, by the library or streamed; sums are fp32."""
    weight, how = make_weight(scaled(outputs, inputs, torch.float32), 128, 128), Rounding(128)
    x, bias = 3 * randn(tokens, inputs, dtype=torch.bfloat16), randn(outputs, dtype=torch.bfloat16)
    for rows in (kernels.to_fp8(x, how), kernels.rms_norm_fp8(x, None, randn(inputs, dtype=x.dtype), 1e-5, how)[0]):
        assert rows.by_group
        assert plans.library_takes(rows, weight, x.dtype) == (tokens > 128 or outputs > 32 * HERE.multiprocessors)
        expected = exact(rows, weight)
        for add in (None, bias):
            y = kernels.linear_fp8(rows, weight, add, x.dtype)
            assert y.shape == (tokens, outputs)
            assert y.is_contiguous()
            wanted = expected if add is None else expected + bias.double()
            check_close(y, wanted.to(x.dtype), terms=inputs, slack=4)


@pytest.mark.skipif(not HERE.is_hopper, reason="needs a Hopper GPU")
@pytest.mark.parametrize("tokens", [129, 200, 256])
@pytest.mark.parametrize(("outputs", "inputs"), [(592, 1040), (1040, 4224)])
def test_few_outputs_of_more_tokens(randn, scaled, kernels, tokens, outputs, inputs):
    """Short ones, whose tiles are whole, and long ones, that programs share."""
    weight = make_weight(scaled(outputs, inputs, torch.float32), 1, None)
    rows = kernels.to_fp8(3 * randn(tokens, inputs, dtype=torch.bfloat16), Rounding())
    assert not plans.library_takes(rows, weight, torch.bfloat16)
    assert plans.plan_fp8_hopper(rows, weight, torch.bfloat16, HERE) is not None
    y = kernels.linear_fp8(rows, weight, None, torch.bfloat16)
    check_close(y, exact(rows, weight).to(y.dtype), terms=inputs)


@needs_e4m3
@pytest.mark.parametrize("dtype", PRODUCT_DTYPES)
@pytest.mark.parametrize(("tokens", "outputs", "inputs", "rows", "group"), SHAPES)
def test_products(randn, scaled, kernels, reference, tokens, outputs, inputs, rows, group, dtype):
    """Both implementations are the exactly scaled product of the numbers, with a bias, rounded once."""
    weight = make_weight(scaled(outputs, inputs, torch.float32), rows, group)
    x, bias = reference.to_fp8(3 * randn(tokens, inputs), Rounding(group)), randn(outputs, dtype=dtype)
    expected = exact(x, weight)
    for each in (reference, kernels):
        check_close(each.linear_fp8(x, weight, None, dtype), expected.to(dtype), terms=inputs)
        check_close(each.linear_fp8(x, weight, bias, dtype), (expected + bias.double()).to(dtype), terms=inputs)
        fixed = each.linear_fp8(x, weight, bias, dtype, deterministic=True)
        check_close(fixed, (expected + bias.double()).to(dtype), terms=inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("tokens", "outputs", "inputs", "rows", "group"), SHAPES)
def test_products_of_tokens_as_they_are(randn, scaled, kernels, reference, tokens, outputs, inputs, rows, group, dtype):
    weight = make_weight(scaled(outputs, inputs, torch.float32), rows, group)
    x, bias = 3 * randn(tokens, inputs, dtype=dtype), randn(outputs, dtype=dtype)
    expected = (x.double() @ weight.dequantised().double().T + bias.double()).to(dtype)
    for each in (reference, kernels):
        check_close(each.linear_fp8_weight(x, weight, bias), expected, terms=inputs)
        check_close(each.linear_fp8_weight(x, weight, bias, deterministic=True), expected, terms=inputs)


def test_every_code_becomes_its_number(kernels, device):
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 127) != 127].view(2, 127).to(device).view(E4M3)
    ones = torch.ones(2, 1, device=device)
    y = kernels.linear_fp8_weight(torch.eye(127, device=device), Fp8Weight(codes, ones), None)
    assert torch.equal(y, codes.float().T)
    beside_zeros = torch.zeros(254, 2, device=device).to(E4M3)
    beside_zeros[:, 0] = codes.flatten()
    alone = Fp8Weight(beside_zeros, torch.ones(254, 1, device=device))
    for gpu in HARDWARE:
        with assumed(device, gpu):
            y = kernels.linear_fp8_weight(torch.tensor([[1.0, 0.0]], device=device), alone, None)
        assert torch.equal(y, codes.float().view(1, -1))


# outputs, inputs, outputs that share a scale, inputs that do. The norm of rows of 4,000 and more is found once. Outputs
# of a program share their scales in the last two.
ONE_TOKEN = [
    (33, 130, 1, None),
    (40, 300, 8, 128),
    (6, 64, 1, 32),
    (6, 4100, 1, None),
    (320, 300, 128, 128),
    (24, 4000, 8, 128),
]


@pytest.mark.parametrize("gpu", HARDWARE, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16] + [torch.bfloat16] * ON_GPU)
@pytest.mark.parametrize(("outputs", "inputs", "rows", "group"), ONE_TOKEN)
def test_one_token_as_it_is(
    randn, scaled, kernels, reference, device, monkeypatch, outputs, inputs, rows, group, dtype, gpu
):
    """With a norm before it and the activation behind it, by the kernel for single tokens; several take several."""
    chosen, choose = [], plans.choose_fp8_vector
    monkeypatch.setattr(plans, "choose_fp8_vector", lambda *size, **how: chosen.append(how) or choose(*size, **how))
    weight = make_weight(2 * scaled(outputs, inputs, torch.float32), rows, group)
    wide, silu = weight.dequantised().double().T, torch.nn.functional.silu
    bias, norm = randn(outputs, dtype=dtype), (randn(inputs, dtype=dtype), 1e-5)
    for tokens in (1, 3):
        x, residual = 3 * randn(tokens, inputs + 1, dtype=dtype)[:, 1:], randn(tokens, inputs, dtype=dtype)
        for each in (reference, kernels):
            chosen.clear()
            alone = each is kernels and tokens == 1
            with assumed(device, gpu):
                y, total = each.fused_linear_fp8_weight(x, weight, bias)
            assert chosen == [{"gated": False}] * alone
            assert total is x
            check_close(y, (x.double() @ wide + bias.double()).to(dtype), terms=inputs)
            for before in (None, residual):
                sum_ = x if before is None else x + before
                whole = sum_.double()
                normed = whole * torch.rsqrt(whole.square().mean(1, keepdim=True) + norm[1]) * norm[0].double()
                expected = normed @ wide
                with assumed(device, gpu):
                    y, total = each.fused_linear_fp8_weight(x, weight, bias, norm=norm, residual=before)
                check_close(y, (expected + bias.double()).to(dtype), terms=inputs)
                assert total is x if before is None else torch.equal(total, sum_)
                if outputs % 2 == 0:
                    gate, up = expected.chunk(2, dim=1)
                    with assumed(device, gpu):
                        y, _ = each.fused_linear_fp8_weight(x, weight, norm=norm, residual=before, act="silu")
                    assert ({"gated": True} in chosen) == alone
                    # By several launches the norm, gate and up are rounded.
                    slack = 1.0 if alone and inputs < 4000 else 3.0
                    check_close(y, (silu(gate) * up).to(dtype), terms=inputs, slack=slack)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16] + [torch.bfloat16] * ON_GPU)
@pytest.mark.parametrize(
    ("outputs", "inputs", "rows", "group"),
    [
        (140, 96, 1, None),
        (33, 1100, 1, None),
        (9, 31, 1, None),
        (33, 130, 16, 128),
        (200, 700, 128, 128),
        (40, 1200, 8, 64),
        (21, 96, 1, 32),
    ],
)
def test_by_dequantised_weights(randn, scaled, monkeypatch, outputs, inputs, rows, group, dtype):
    """All at once, and in parts; each weight is rounded once."""
    from rayllm_kernels.quantised.fp8_dequantise_kernel import dequantise

    weight = make_weight(scaled(outputs, inputs, torch.float32), rows, group)
    out = torch.full((outputs - 4, inputs + 9), 7.0, dtype=dtype, device=weight.values.device).flatten()
    part = out[: (outputs - 5) * inputs].view(outputs - 5, inputs)
    dequantise(weight, 4, part)
    assert torch.equal(part, weight.dequantised()[4:-1].to(dtype))
    assert (out[part.numel() :] == 7.0).all()
    x, bias = randn(5, inputs, dtype=dtype), randn(outputs, dtype=dtype)
    expected = x.double() @ weight.dequantised().double().T
    for size in (plans.DEQUANTISED_BYTES, 1):
        monkeypatch.setattr(plans, "DEQUANTISED_BYTES", size)
        y = linear_dequantised(x, outputs, None, partial(dequantise, weight))
        check_close(y, expected.to(dtype), terms=inputs)
        y = linear_dequantised(x, outputs, bias, partial(dequantise, weight))
        check_close(y, (expected + bias.double()).to(dtype), terms=inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("rows", "group"), [(1, None), (8, 32)])
def test_how_many_tokens_choose_the_product(randn, scaled, kernels, monkeypatch, rows, group, dtype):
    """But for the deterministic mode, in which a token has the same bits alone and among others."""
    from rayllm_kernels.quantised.fp8_dequantise_kernel import dequantise

    monkeypatch.setitem(plans.LEAST_DEQUANTISED_TOKENS, 8, 5)
    weight = make_weight(scaled(200, 160, torch.float32), rows, group)
    x, bias = randn(5, 160, dtype=dtype), randn(200, dtype=dtype)
    dequantised = linear_dequantised(x, 200, bias, partial(dequantise, weight))
    assert torch.equal(kernels.linear_fp8_weight(x, weight, bias), dequantised) == (dtype == torch.float16)
    assert not torch.equal(kernels.linear_fp8_weight(x[:4], weight, bias), dequantised[:4])
    fixed = kernels.linear_fp8_weight(x, weight, bias, deterministic=True)
    for token in range(5):
        alone = kernels.linear_fp8_weight(x[token : token + 1], weight, bias, deterministic=True)
        assert torch.equal(alone, fixed[token : token + 1])


TILES = {
    plans.choose_fp8_tiles(tokens, outputs, group, HERE._replace(multiprocessors=count))
    for tokens in (1, 17, 40, 70, 129)
    for outputs in (16, 5000)
    for group in (None, 32, 128)
    for count in (1, 132)
}


@needs_e4m3
@pytest.mark.parametrize("tiles", sorted(TILES), ids=str)
def test_every_tile_that_may_be_chosen(randn, scaled, reference, tiles: Tiles):
    from rayllm_kernels.quantised.fp8_product_kernel import multiply

    tokens, outputs, inputs = min(tiles.tokens, 20) + 1, 40, tiles.depth + 48
    for group in {None, 32, 64, 128}:
        part = tiles.depth // tiles.slices
        if group is not None and group % part:
            continue
        weight = make_weight(scaled(outputs, inputs, torch.float32), 1 if group is None else 8, group)
        x = reference.to_fp8(randn(tokens, inputs), Rounding(group))
        y = multiply(x.values, x.scales, weight, None, PRODUCT_DTYPES[0], tiles)
        check_close(y, exact(x, weight).to(PRODUCT_DTYPES[0]), terms=inputs)


@needs_e4m3
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("outputs", "inputs", "rows", "group"), ONE_TOKEN)
def test_a_product_that_rounds_its_tokens(randn, scaled, kernels, reference, outputs, inputs, rows, group, dtype):
    """With a norm before it and the activation behind it: by one kernel for one token, which stays as it is, and by
    several for more.
    """
    weight, how = make_weight(2 * scaled(outputs, inputs, torch.float32), rows, group), Rounding(group)
    bias, norm = randn(outputs, dtype=dtype), (randn(inputs, dtype=dtype), 1e-5)
    for tokens in (1, 3):
        x, residual = 3 * randn(tokens, inputs, dtype=dtype), randn(tokens, inputs, dtype=dtype)
        whole = (x + residual).double()
        plain = whole * torch.rsqrt(whole.square().mean(1, keepdim=True) + norm[1]) * norm[0].double()
        for each in (kernels, reference):
            products = [
                exact(rows, weight)
                for rows in (reference.to_fp8(x, how), reference.rms_norm_fp8(x, residual, *norm, how)[0])
            ]
            if each is kernels and tokens == 1:
                products = [each.double() @ weight.dequantised().double().T for each in (x, plain)]
            y, total = each.linear_rounding_fp8(x, how, weight, bias)
            assert total is x
            check_close(y, (products[0] + bias.double()).to(dtype), terms=inputs)
            before = {"norm": norm, "residual": residual}
            y, total = each.linear_rounding_fp8(x, how, weight, **before)
            check_close(total, x + residual)
            check_close(y, products[1].to(dtype), terms=inputs)
            if outputs % 2 == 0:
                gate, up = products[1].chunk(2, dim=1)
                act = "silu" if group is None else "gelu"
                activated = torch.nn.functional.silu(gate) if group is None else torch.nn.functional.gelu(gate)
                y, _ = each.linear_rounding_fp8(x, how, weight, act=act, **before)
                check_close(y, (activated * up).to(dtype), terms=inputs)


@needs_e4m3
def test_tokens_with_a_scale_found_beforehand(randn, scaled, kernels, reference, device):
    weight, how = make_weight(scaled(24, 96, torch.float32)), Rounding(None, torch.tensor([0.01], device=device))
    x = randn(3, 96)
    y, _ = kernels.linear_rounding_fp8(x, how, weight)
    check_close(y, exact(reference.to_fp8(x, how), weight).float(), terms=96)


@pytest.mark.parametrize("group", [None, 32])
def test_rows_do_not_know_of_other_rows(randn, scaled, assert_rows_independent, reference, group):
    weight = make_weight(scaled(24, 64, torch.float32), 1, group)
    x = randn(201, 64)

    def product(x):
        return (reference.linear_fp8(reference.to_fp8(x, Rounding(group)), weight, None, x.dtype, deterministic=True),)

    assert_rows_independent(product, x)
    assert_rows_independent(lambda x: (reference.linear_fp8_weight(x, weight, deterministic=True),), x)


def test_no_tokens(randn, each):
    weight = make_weight(randn(16, 32))
    x = each.to_fp8(randn(0, 32), Rounding())
    assert each.linear_fp8(x, weight, None, torch.float16).shape == (0, 16)
    assert each.linear_fp8_weight(randn(0, 32), weight).shape == (0, 16)
    assert each.act_and_mul_fp8(randn(0, 64), Rounding(32), "silu").scales.shape == (0, 1)


def test_errors(randn, each):
    weight, x, x32 = make_weight(randn(16, 64)), each.to_fp8(randn(2, 64), Rounding()), randn(1, 64)
    groups, halves, E16 = make_weight(randn(16, 64), 8, 32), each.to_fp8(randn(2, 64), Rounding(32)), torch.float16
    calls = [
        ("x", lambda: each.to_fp8(randn(2, 3, 4), Rounding())),
        ("group", lambda: each.to_fp8(randn(2, 64), Rounding(48))),
        ("x", lambda: each.act_and_mul_fp8(randn(2, 7), Rounding(), "silu")),
        ("residual", lambda: each.rms_norm_fp8(randn(2, 8), randn(1, 8), randn(8), 1e-6, Rounding())),
        ("weight", lambda: each.linear_fp8(x, make_weight(randn(16, 32)), None, torch.float16)),
        ("weight", lambda: each.linear_fp8_weight(randn(2, 32), weight)),
        ("weight.rows", lambda: each.linear_fp8(x, weight._replace(rows=2), None, torch.float16)),
        ("weight.group", lambda: each.linear_fp8(x, weight._replace(group=16), None, torch.float16)),
        ("weight.scales", lambda: each.linear_fp8(x, weight._replace(scales=weight.scales.T), None, torch.float16)),
        ("x.group", lambda: each.linear_fp8(x._replace(group=32), weight, None, torch.float16)),
        ("x.scales", lambda: each.linear_fp8(x._replace(scales=x.scales[:1]), weight, None, torch.float16)),
        (
            "x.scales",
            lambda: each.linear_fp8(halves._replace(scales=halves.scales.T.contiguous().T), groups, None, E16),
        ),
        ("bias", lambda: each.linear_fp8(x, weight, randn(16), torch.float16)),
        ("weight", lambda: each.linear_rounding_fp8(randn(1, 64), Rounding(), weight, randn(16), act="silu")),
        ("bias", lambda: each.linear_rounding_fp8(randn(1, 64), Rounding(), weight, randn(15))),
        ("residual", lambda: each.linear_rounding_fp8(x32, Rounding(), weight, norm=(randn(64), 1.0), residual=x32[0])),
        ("x", lambda: each.linear_fp8_weight(randn(64), weight)),
        ("weight", lambda: each.fused_linear_fp8_weight(x32, weight, randn(16), act="silu")),
        ("act", lambda: each.fused_linear_fp8_weight(x32, weight, act="none")),
        ("bias", lambda: each.fused_linear_fp8_weight(x32, weight, randn(15))),
        ("norm", lambda: each.fused_linear_fp8_weight(x32, weight, norm=(randn(32), 1.0))),
        ("residual", lambda: each.fused_linear_fp8_weight(x32, weight, norm=(randn(64), 1.0), residual=x32[0])),
        ("residual", lambda: each.fused_linear_fp8_weight(x32, weight, residual=x32)),
        ("residual", lambda: each.linear_rounding_fp8(x32, Rounding(), weight, residual=x32)),
    ]
    for name, call in calls:
        with pytest.raises(ValueError, match=f"^{name} "):
            call()
