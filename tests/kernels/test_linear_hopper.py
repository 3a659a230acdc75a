"""The Hopper projection kernel: every tile, odd shapes, shared and whole tiles, and which projections it is given."""

from __future__ import annotations

import pytest
import torch

from rayllm_kernels import reference
from rayllm_kernels.linear_hopper_plan import MAX_TOKENS, TILES, hopper_takes, plan_hopper

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
on_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
# tokens, outputs, inputs: tails of every dimension, one unit in all, K shorter than a stage
SHAPES = [(3, 72, 40), (16, 64, 64), (61, 1040, 520), (130, 592, 2056), (257, 1000, 1024), (5, 6144, 4096)]


def weights(randn, outputs, inputs, dtype):
    return randn(outputs, inputs).mul_(inputs**-0.5).to(dtype)


@on_hopper
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("programs", [1, 7, 132, 264])
@pytest.mark.parametrize("tile", TILES)
def test_every_tile_by_any_number_of_programs(randn, assert_kernel_close, tile, programs, gated):
    from rayllm_kernels.linear_hopper import linear_hopper

    expected_of = reference.linear_silu_mul if gated else reference.linear
    for tokens, outputs, inputs in SHAPES:
        if programs == 1 and outputs * inputs > 1 << 22:
            continue
        x = randn(tokens, inputs, dtype=torch.bfloat16)
        weight = weights(randn, 2 * outputs if gated else outputs, inputs, torch.bfloat16)
        y = linear_hopper(x, weight, tile, programs, gated=gated)
        assert_kernel_close(y, expected_of(x, weight))
        assert torch.equal(y, linear_hopper(x, weight, tile, programs, gated=gated))


@on_hopper
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 3, 8, 31, 64, 65, 100, 129, 192, 255, 256, 257])
def test_bias_and_strided_rows(randn, assert_kernel_close, kernels, tokens, dtype):
    x = randn(tokens, 1024 + 64, dtype=dtype)[:, 64:]
    weight, bias = weights(randn, 1536, 1024, dtype), randn(1536, dtype=dtype)
    assert_kernel_close(kernels.linear(x, weight, bias), reference.linear(x, weight, bias))
    assert_kernel_close(kernels.linear_silu_mul(x, weight), reference.linear_silu_mul(x, weight))


@on_hopper
def test_shared_tiles_give_the_same_sums_every_time(randn):
    """Programs that add up each other's sums: 200 runs, back to back, so that kernels overlap."""
    from rayllm_kernels.linear_hopper import linear_hopper

    x, weight = randn(64, 4096, dtype=torch.bfloat16), weights(randn, 1000, 4096, torch.bfloat16)
    tile = next(tile for tile in TILES if tile.tokens == 64)
    expected = linear_hopper(x, weight, tile, 131)
    results = [linear_hopper(x, weight, tile, 131) for _ in range(200)]
    assert all(torch.equal(y, expected) for y in results)


def test_layouts_that_tensor_copies_cannot_take_go_elsewhere(randn, assert_kernel_close, kernels):
    x, weight = randn(40, 256, dtype=torch.float16), weights(randn, 64, 256, torch.float16)
    odd = randn(40, 259, dtype=torch.float16)[:, 3:]
    assert hopper_takes(x, weight, gated=True)
    assert not hopper_takes(odd, weight, gated=False)
    assert not hopper_takes(x.float(), weight.float(), gated=False)
    assert not hopper_takes(x, weight[:20], gated=True)
    assert_kernel_close(kernels.linear(odd, weight), reference.linear(odd, weight))
    assert_kernel_close(kernels.linear_silu_mul(x, weight[:20]), reference.linear_silu_mul(x, weight[:20]))


@pytest.mark.parametrize("multiprocessors", [78, 132])
def test_plans_keep_to_what_the_kernel_can_do(multiprocessors):
    from rayllm_kernels.linear_hopper_plan import NARROW

    planned = 0
    for tokens in (1, 2, 5, 16, 17, 64, 65, 100, 128, 129, 5000):
        for rows in (16, 1024, 1536, 4096, 28672, 151936):
            for inputs in (64, 1024, 4096, 14336):
                for gated in (False, True):
                    plan = plan_hopper(tokens, rows, inputs, gated, multiprocessors)
                    if plan is None:
                        continue
                    tile, programs = plan
                    planned += 1
                    assert tokens <= MAX_TOKENS
                    assert tile in TILES
                    room = 2 * multiprocessors if tile in NARROW.values() else multiprocessors
                    assert 0 < programs <= room  # all run at once, since they wait for one another
    assert planned > 100


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from rayllm_kernels.linear_hopper import DEPTH, SHARED, SHARED_GATED, _linear_hopper_kernel
from rayllm_kernels.linear_hopper_plan import NARROW, WIDE, WIDEST

def descriptor(shape, layout):
    return f"tensordesc<bf16{shape},{layout.value!r}>"

for tile, gated in ((NARROW[16], False), (WIDE[64], True), (WIDEST, False)):
    rows, depth = tile.blocks * 64, DEPTH.value
    weight = descriptor([rows // 16, 2, 8, depth], SHARED_GATED) if gated else descriptor([rows, depth], SHARED)
    constants = {"TOKENS": tile.tokens, "CONSUMERS": tile.consumers, "BLOCKS": tile.blocks, "STAGES": tile.stages,
                 "REGISTERS": tile.registers, "HAS_BIAS": not gated, "GATED": gated, "OVERLAP": True}
    types = {"w_desc": weight, "x_desc": descriptor([tile.tokens, depth], SHARED), "y_ptr": "*bf16",
             "bias_ptr": "*bf16", "partial_ptr": "*fp32", "flags_ptr": "*i32"}
    names = _linear_hopper_kernel.arg_names
    signature = {n: types.get(n, "i32") for n in names} | dict.fromkeys(constants, "constexpr")
    values = {(names.index(n),): value for n, value in constants.items()}
    options = {"num_warps": 4, "maxnreg": tile.registers, "launch_pdl": True}
    source = GluonASTSource(_linear_hopper_kernel, signature, values)
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    print(kernel.asm["ptx"].count("wgmma.mma"), kernel.metadata.shared, 2 if tile.consumers == 1 else 1)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernel itself")
def test_the_kernel_compiles_and_fits(run_compiler):
    """Gluon has no interpreter, and its API moves: at least, every version of Triton must build the kernel."""
    lines = run_compiler(COMPILE).splitlines()
    assert len(lines) == 3
    for line in lines:
        products, shared, programs = map(int, line.split())
        assert products > 0
        assert programs * (shared + 1024) <= 228 << 10  # bytes of a multiprocessor, of which each program costs 1,024
