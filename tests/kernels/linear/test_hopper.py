"""The Hopper projection kernel: every tile, odd shapes, shared and whole tiles, and which projections it is given."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support.closeness import check_close

from rayllm_kernels import ops
from rayllm_kernels.linear.plans import HOPPER_TILES, NARROW, WIDE_OWN_SUMS, WIDEST, hopper_takes, plan_hopper_fp8

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
on_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
# tokens, outputs, inputs: tails of every dimension, one unit in all, K shorter than a stage
SHAPES = [(3, 72, 40), (16, 64, 64), (61, 1040, 520), (130, 592, 2056), (257, 1000, 1024), (5, 6144, 4096)]


@on_hopper
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("programs", [1, 7, 132, 264])
@pytest.mark.parametrize("tile", HOPPER_TILES)
def test_every_tile_by_any_number_of_programs(randn, scaled, reference, tile, programs, gated):
    from rayllm_kernels.linear.hopper_kernel import linear_hopper

    expected_of = partial(reference.linear_act_mul, act="gelu_new") if gated else reference.linear
    for tokens, outputs, inputs in SHAPES:
        if programs == 1 and outputs * inputs > 1 << 22:
            continue
        x = randn(tokens, inputs, dtype=torch.bfloat16)
        weight = scaled(2 * outputs if gated else outputs, inputs, torch.bfloat16)
        y = linear_hopper(x, weight, (tile, programs), act="gelu_tanh" if gated else None)
        check_close(y, expected_of(x, weight), terms=inputs)
        assert torch.equal(y, linear_hopper(x, weight, (tile, programs), act="gelu_tanh" if gated else None))


@on_hopper
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 3, 8, 31, 64, 65, 100, 129, 192, 255, 256, 257])
def test_bias_and_strided_rows(randn, scaled, kernels, reference, tokens, dtype):
    x = randn(tokens, 1024 + 64, dtype=dtype)[:, 64:]
    weight, bias = scaled(1536, 1024, dtype), randn(1536, dtype=dtype)
    check_close(kernels.linear(x, weight, bias), reference.linear(x, weight, bias), terms=1024)
    check_close(
        kernels.linear_act_mul(x, weight, "gelu_new"), reference.linear_act_mul(x, weight, "gelu_new"), terms=1024
    )


@on_hopper
def test_shared_tiles_give_the_same_sums_every_time(randn, scaled):
    """Programs that add up each other's sums: 200 runs, back to back, so that kernels overlap."""
    from rayllm_kernels.linear.hopper_kernel import linear_hopper

    x, weight = randn(64, 4096, dtype=torch.bfloat16), scaled(1000, 4096, torch.bfloat16)
    tile = next(tile for tile in HOPPER_TILES if tile.tokens == 64)
    expected = linear_hopper(x, weight, (tile, 131), act=None)
    results = [linear_hopper(x, weight, (tile, 131), act=None) for _ in range(200)]
    assert all(torch.equal(y, expected) for y in results)


@on_hopper
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("programs", [1, 7, 132, 264])
@pytest.mark.parametrize("tile", [*(tile for tile in HOPPER_TILES if tile != WIDEST), WIDE_OWN_SUMS])
def test_every_tile_of_fp8(randn, scaled, tile, programs, blocks):
    from rayllm_kernels.linear.hopper_kernel import linear_hopper_fp8

    if blocks and tile.own_sums:
        pytest.skip("their scales are for sums of a block")
    for tokens, outputs, inputs in [(3, 72, 48), (16, 64, 128), (61, 1040, 528), (130, 592, 2064), (5, 6144, 4096)]:
        if programs == 1 and outputs * inputs > 1 << 22:
            continue
        x = ops.to_fp8(randn(tokens, inputs, dtype=torch.bfloat16), ops.Rounding(128 if blocks else None))
        values = (scaled(outputs, inputs, torch.float32) * 100).to(torch.float8_e4m3fn)
        shape = (-(-outputs // 128), -(-inputs // 128)) if blocks else (outputs, 1)
        scales = torch.rand(shape, device=values.device) / 100 + 0.005
        weight = ops.Fp8Weight(values, scales, 128, 128) if blocks else ops.Fp8Weight(values, scales)
        bias = randn(outputs, dtype=torch.bfloat16)
        y = linear_hopper_fp8(x, weight, (tile, programs), bias, torch.bfloat16)
        expected = (x.dequantised().double() @ weight.dequantised().double().t() + bias.double()).to(y.dtype)
        check_close(y, expected, terms=inputs, slack=4)
        assert torch.equal(y, linear_hopper_fp8(x, weight, (tile, programs), bias, torch.bfloat16))


def test_layouts_that_tensor_copies_cannot_take_go_elsewhere(randn, scaled, kernels, reference):
    x, weight = randn(40, 256, dtype=torch.float16), scaled(64, 256, torch.float16)
    odd = randn(40, 259, dtype=torch.float16)[:, 3:]
    assert hopper_takes(x, weight, gated=True)
    assert not hopper_takes(odd, weight, gated=False)
    assert not hopper_takes(x.float(), weight.float(), gated=False)
    assert not hopper_takes(x, weight[:20], gated=True)
    check_close(kernels.linear(odd, weight), reference.linear(odd, weight), terms=256)
    check_close(
        kernels.linear_act_mul(x, weight[:20], "silu"), reference.linear_act_mul(x, weight[:20], "silu"), terms=256
    )


COMPILE = """
from rayllm_kernels.linear import hopper_kernel
from rayllm_kernels.linear.plans import NARROW, WIDE, WIDE_OWN_SUMS, WIDEST

# A CPU has no streams that might be captured.
x, bias = torch.zeros(16, 128, dtype=torch.bfloat16), torch.zeros(256, dtype=torch.bfloat16)
weight = torch.zeros(256, 128, dtype=torch.bfloat16)
rows = ops.Fp8Rows(x.to(torch.float8_e4m3fn), torch.ones(16, 1))
fp8 = ops.Fp8Weight(weight.to(torch.float8_e4m3fn), torch.ones(256, 1))
blocks = fp8._replace(scales=torch.ones(2, 1), rows=128, group=128)
linear, linear_fp8 = hopper_kernel.linear_hopper, hopper_kernel.linear_hopper_fp8
known = set()
for programs, call in (
    (2, lambda: linear(x, weight, (NARROW[16], 264), bias, act=None)),
    (1, lambda: linear(x, weight, (WIDE[64], 132), None, act="gelu_tanh")),
    (1, lambda: linear(x, weight, (WIDEST, 132), bias, act=None)),
    (2, lambda: linear_fp8(rows, fp8, (NARROW[16], 264), bias, torch.bfloat16)),
    (1, lambda: linear_fp8(rows._replace(group=128), blocks, (WIDE[128], 132), None, torch.bfloat16)),
    (1, lambda: linear_fp8(rows, fp8, (WIDE_OWN_SUMS, 132), None, torch.bfloat16)),
):
    with ops.compile_only():
        call()
    [kernel] = set(hopper_kernel._linear_hopper_kernel.device_caches[0][0].values()) - known
    known.add(kernel)
    print(kernel.asm["ptx"].count("wgmma.mma"), kernel.metadata.shared, programs)
"""


def test_plans_of_more_tokens_in_e4m3():
    """Of few outputs only, and of long rows only if programs share them."""
    for tokens in (129, 256):
        for row_scales in (False, True):
            assert plan_hopper_fp8(tokens, 2048, 4096, 132, row_scales=row_scales) == (NARROW[128], 128)
            assert plan_hopper_fp8(tokens, 1024, 2048, 132, row_scales=row_scales)[0] == NARROW[64]
        for outputs, programs in ((3072, 96), (4096, 128), (4224, 132)):
            assert plan_hopper_fp8(tokens, outputs, 4096, 132, row_scales=True) == (WIDE_OWN_SUMS, programs)
            assert plan_hopper_fp8(tokens, outputs, 4096, 132, row_scales=False) is None
        assert plan_hopper_fp8(tokens, 4240, 4096, 132, row_scales=True) is None
    assert plan_hopper_fp8(257, 1024, 2048, 132, row_scales=True) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernel itself")
def test_the_kernel_compiles_and_fits(run_compiler, tmp_path):
    """Gluon has no interpreter, and its API moves: at least, every version of Triton must build the kernel."""
    for line in run_compiler(COMPILE, TRITON_CACHE_DIR=str(tmp_path)).splitlines():
        products, shared, programs = map(int, line.split())
        assert products > 0
        assert programs * (shared + 1024) <= 228 << 10  # bytes of a multiprocessor, of which each program costs 1,024
