"""4 bits on Hopper: every tile, groups that end inside a unit's halves, shared and whole tiles, and what is taken."""

from __future__ import annotations

import pytest
import torch
from support.closeness import check_close
from support.int4 import random_weight

from rayllm_kernels.device import Hardware
from rayllm_kernels.ops import Int4Weight
from rayllm_kernels.quantised import plans

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
on_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
H200 = Hardware(132, 227 << 10, (9, 0))
TILES = sorted(plans.INT4_HOPPER_TILES)
# tokens, outputs, inputs, group: tails of every dimension, one unit in all, halves of which one is filled up
SHAPES = [(3, 72, 320, 64), (16, 64, 256, 128), (61, 1040, 544, None), (130, 592, 2112, 64), (5, 6144, 4096, 128)]


def as_multiplied(weight, dtype):
    """The weights that the tensor cores see, which is what a product's bounds are for: scales are rounded to the
    tokens' dtype, and once more what they are multiplied by.
    """
    scales = weight.scales.to(dtype)
    wide = weight._replace(scales=scales.float()).dequantised().to(dtype)
    # And the whole of it is close to the weights: each rounding is off by half a unit in the last place at most.
    assert (
        (wide.double() - weight.dequantised().double()).abs() <= 2.01 * torch.finfo(dtype).eps / 2 * wide.double().abs()
    ).all()
    return wide.double()


@on_hopper
@pytest.mark.parametrize("act", [None, "silu"])
@pytest.mark.parametrize("programs", [1, 7, 132, 396])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile_by_any_number_of_programs(randn, tile, programs, act):
    from rayllm_kernels.quantised.int4_hopper_kernel import linear_int4_hopper

    for tokens, outputs, inputs, group in SHAPES:
        if (programs == 1 and outputs * inputs > 1 << 22) or (group or tile.depth) % tile.depth:
            continue
        x = randn(tokens, inputs, dtype=torch.bfloat16)
        rows = 2 * outputs if act else outputs
        weight = random_weight(rows, inputs, group, symmetric=act is None, device=x.device)
        y = linear_int4_hopper(x, weight, (tile, programs), act=act)
        expected = x.double() @ as_multiplied(weight, x.dtype).T
        if act:
            gate, up = expected.chunk(2, dim=1)
            expected = torch.nn.functional.silu(gate) * up
        check_close(y, expected.to(y.dtype), terms=inputs)
        assert torch.equal(y, linear_int4_hopper(x, weight, (tile, programs), act=act))


@on_hopper
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [2, 8, 31, 64, 65, 129, 256, 257, 600, 3000])
def test_bias_and_strided_rows(randn, kernels, tokens, dtype):
    """Also by PyTorch's product of dequantised weights, from some number of tokens on."""
    x, bias = randn(tokens, 1024 + 64, dtype=dtype)[:, 64:], randn(1536, dtype=dtype)
    weight = random_weight(1536, 1024, 128, symmetric=False, device=x.device)
    # The weights as they are multiplied: gates would carry their rounding over to large factors.
    dequantised = tokens >= plans.LEAST_DEQUANTISED_TOKENS[4]
    wide = weight.dequantised().to(dtype).double() if dequantised else as_multiplied(weight, dtype)
    expected = x.double() @ wide.T
    check_close(kernels.linear_int4(x, weight, bias), (expected + bias.double()).to(dtype), terms=1024)
    gate, up = expected.chunk(2, dim=1)
    y, _ = kernels.fused_linear_int4(x, weight, act="silu")
    check_close(y, (torch.nn.functional.silu(gate) * up).to(dtype), terms=1024, slack=3.0)


@on_hopper
def test_every_number_in_every_place(randn, kernels):
    """The identity times weights gives these back, each from its own place."""
    inputs = 256
    codes = torch.arange(16 * 16, device="cuda", dtype=torch.int32)
    codes = (codes[:, None] * 7 + torch.arange(inputs // 2, device="cuda")[None] * 11).to(torch.uint8)
    scales = torch.exp2(torch.arange(2, device="cuda").float())[:, None].repeat(1, 256)
    zeros = (torch.arange(512, device="cuda") % 16).to(torch.uint8).view(2, 256)
    weight = Int4Weight(codes.contiguous(), scales, zeros, inputs, 128)
    for dtype in (torch.float16, torch.bfloat16):
        y = kernels.linear_int4(torch.eye(inputs, device="cuda", dtype=dtype), weight)
        assert torch.equal(y, weight.dequantised().T.to(dtype))


def test_what_is_taken():
    def plan(tokens, outputs=4096, inputs=4096, group=128, *, dtype=torch.bfloat16, gpu=H200, gated=False):
        x = torch.empty(tokens, inputs, dtype=dtype, device="meta")
        codes = random_weight(outputs, inputs, group, symmetric=True, device="meta").codes
        return plans.plan_int4_hopper(x, codes, group, gpu, gated=gated)

    for tokens in (2, 16, 64, 100, 256):
        for outputs, inputs in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (64, 512), (200, 448)):
            for group in (64, 128, 192, None):
                tile, programs = plan(tokens, outputs, inputs, group)
                assert tile in TILES
                assert 0 < programs <= 396
                assert (group or tile.depth) % tile.depth == 0
    assert plan(16, group=32) is None
    assert plan(16, dtype=torch.float32) is None
    assert plan(16, gpu=H200._replace(capability=(8, 0))) is None
    assert plan(16, inputs=128) is None  # no second half
    assert plan(16, outputs=24, gated=True) is None
    assert plan(16, outputs=32, gated=True) is not None


COMPILE = """
from rayllm_kernels.quantised import int4_hopper_kernel, plans

x, bias = torch.zeros(16, 512, dtype=torch.bfloat16), torch.zeros(256, dtype=torch.bfloat16)
codes, scales = torch.zeros(256, 256, dtype=torch.uint8), torch.ones(4, 256)
known = set()
for i, (tile, kind) in list(enumerate(plans.INT4_HOPPER_TILES.items()))[::EVERY]:
    zeros, act = (scales.to(torch.uint8), "silu") if i % 2 else (None, None)
    weight = ops.Int4Weight(codes, scales, zeros, 512, 128)
    with ops.compile_only():
        int4_hopper_kernel.linear_int4_hopper(x, weight, (tile, 132), None if act else bias, act=act)
    [kernel] = set(int4_hopper_kernel._int4_hopper_kernel.device_caches[0][0].values()) - known
    known.add(kernel)
    print(kernel.asm["ptx"].count("wgmma.mma"), kernel.metadata.shared, kind.programs)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernel itself")
def test_the_kernel_compiles_and_fits(run_compiler, tmp_path, full_matrix):
    """Gluon has no interpreter, and its API moves: at least, every version of Triton must build the kernel.

    A sixth of its tiles, unless with --full-matrix.
    """
    script = COMPILE.replace("EVERY", "1" if full_matrix else "6")
    for line in run_compiler(script, TRITON_CACHE_DIR=str(tmp_path)).splitlines():
        products, shared, programs = map(int, line.split())
        assert products > 0
        assert programs * (shared + 1024) <= 228 << 10  # bytes of a multiprocessor, of which each program costs 1,024
