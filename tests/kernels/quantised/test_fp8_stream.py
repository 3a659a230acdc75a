"""The kernel that streams fp8 weights of many inputs past one token, and which weights it is given."""

from __future__ import annotations

import pytest
import torch
from support.capabilities import HERE
from support.closeness import check_close

from rayllm_kernels.ops import Fp8Weight, Rounding
from rayllm_kernels.quantised import plans
from rayllm_kernels.quantised.plans import StreamPlan

on_hopper = pytest.mark.skipif(not HERE.is_hopper, reason="needs a Hopper GPU")


def make_weight(scaled, outputs, inputs, blocks):
    values = (scaled(outputs, inputs, torch.float32) * 100).to(torch.float8_e4m3fn)
    shape = (-(-outputs // 128), -(-inputs // 128)) if blocks else (outputs, 1)
    scales = torch.rand(shape, device=values.device) / 100 + 0.005
    return Fp8Weight(values, scales, 128, 128) if blocks else Fp8Weight(values, scales)


@on_hopper
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("plan", [StreamPlan(4, 6, 8, 264), StreamPlan(8, 2, 8, 7), StreamPlan(1, 3, 4, 1)])
def test_products(randn, scaled, plan, blocks):
    """Tails of outputs and of a row's last stage; fewer stages of work than the ring has, and more."""
    from rayllm_kernels.quantised.fp8_stream_kernel import linear_fp8_stream

    for outputs, inputs in [(1, 128), (130, 2048), (1000, 8320), (259, 16384)]:
        weight = make_weight(scaled, outputs, inputs, blocks)
        for dtype in (torch.bfloat16, torch.float32):
            x, bias = randn(1, inputs, dtype=dtype), randn(outputs, dtype=dtype)
            expected = x.double() @ weight.dequantised().double().t()
            check_close(linear_fp8_stream(x, weight, None, plan=plan), expected.to(dtype), terms=inputs)
            y = linear_fp8_stream(x, weight, bias, plan=plan)
            check_close(y, (expected + bias.double()).to(dtype), terms=inputs)


@on_hopper
@pytest.mark.parametrize("blocks", [False, True])
def test_long_rows_behind_a_norm(randn, scaled, kernels, reference, blocks):
    """200 products, back to back, each of what the one before gave, so that kernels overlap."""
    weight, how = make_weight(scaled, 8448, 8448, blocks), Rounding(128 if blocks else None)
    assert plans.stream_takes(weight, HERE)
    first, norm = randn(1, 8448, dtype=torch.bfloat16), (randn(8448, dtype=torch.bfloat16), 1e-5)

    def chain():
        x = first
        for _ in range(200):
            x, _ = kernels.linear_rounding_fp8(x, how, weight, norm=norm)
        return x

    y, _ = kernels.linear_rounding_fp8(first, how, weight, norm=norm)
    plain = reference.rms_norm(first, *norm)
    check_close(y, (plain.double() @ weight.dequantised().double().t()).to(y.dtype), terms=8448, slack=2)
    assert torch.equal(chain(), chain())


def test_which_weights_it_is_given(scaled):
    hopper = HERE._replace(capability=(9, 0))
    long, short, odd = (make_weight(scaled, 4, inputs, False) for inputs in (8320, 8192, 8328))
    assert plans.stream_takes(long, hopper)
    assert not plans.stream_takes(long, hopper._replace(capability=(10, 0)))
    assert not plans.stream_takes(short, hopper)
    assert not plans.stream_takes(odd, hopper)
    blocks = make_weight(scaled, 256, 8320, True)
    assert plans.stream_takes(blocks, hopper)
    assert not plans.stream_takes(blocks._replace(rows=6), hopper)
    assert not plans.stream_takes(blocks._replace(group=64), hopper)


COMPILE = """
from rayllm_kernels.quantised import fp8_stream_kernel
from rayllm_kernels.quantised.plans import StreamPlan

known = set()
for inputs, blocks in ((14336, False), (14336, True), (16384, True)):
    x, bias = torch.zeros(1, inputs, dtype=torch.bfloat16), torch.zeros(256, dtype=torch.bfloat16)
    weight = Fp8Weight(torch.zeros(256, inputs, dtype=torch.float8_e4m3fn), torch.ones(256, 1))
    if blocks:
        weight = Fp8Weight(weight.values, torch.ones(2, inputs // 128), 128, 128)
    with ops.compile_only():
        fp8_stream_kernel.linear_fp8_stream(x, weight, bias, plan=StreamPlan(4, 6, 8, 264))
    [kernel] = set(fp8_stream_kernel._fp8_stream_kernel.device_caches[0][0].values()) - known
    known.add(kernel)
    print(kernel.asm["ptx"].count("cp.async.bulk.tensor"), kernel.metadata.shared)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernel itself")
def test_the_kernel_compiles_and_fits(run_compiler, tmp_path):
    """Gluon has no interpreter; two programs must fit a multiprocessor, beside two of the next kernel."""
    for line in run_compiler(COMPILE, TRITON_CACHE_DIR=str(tmp_path)).splitlines():
        copies, shared = map(int, line.split())
        assert copies > 0
        assert 4 * (shared + 1024) <= 228 << 10  # bytes of a multiprocessor, of which each program costs 1,024
