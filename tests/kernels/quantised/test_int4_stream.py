"""The kernel that streams 4-bit weights past one token on Hopper, and which weights it is given."""

from __future__ import annotations

import re
import subprocess

import pytest
import torch
from support.capabilities import HERE
from support.closeness import check_close
from support.int4 import random_weight

from rayllm_kernels.ops import Int4Weight
from rayllm_kernels.quantised import plans
from rayllm_kernels.quantised.plans import Int4StreamPlan

on_hopper = pytest.mark.skipif(not HERE.is_hopper, reason="needs a Hopper GPU")
PLANS = [Int4StreamPlan(8, 2, 264, 80), Int4StreamPlan(4, 5, 7, 64), Int4StreamPlan(8, 3, 1, 80)]
# outputs, inputs, group, dtype: one line a row, a stage and a part of one, halves of which one is filled up, rows of
# scales that no tensor copy takes
SHAPES = [
    (40, 256, 32, torch.bfloat16),
    (72, 768, None, torch.float16),
    (130, 2560, 64, torch.bfloat16),
    (24, 2304, 128, torch.float16),
    (1008, 16384, 64, torch.bfloat16),
    (96, 1536, 192, torch.bfloat16),
    (48, 2048, 128, torch.bfloat16),
    (66, 512, 128, torch.bfloat16),
]


@on_hopper
@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize(("outputs", "inputs", "group", "dtype"), SHAPES)
def test_products(randn, device, plan, outputs, inputs, group, dtype):
    """With a norm before it and the activation behind it; fewer stages of work than the ring has, and more."""
    from rayllm_kernels.quantised.int4_stream_kernel import linear_int4_stream

    x, residual = 3 * randn(1, inputs + 1, dtype=dtype)[:, 1:], randn(1, inputs, dtype=dtype)
    bias, norm = randn(outputs, dtype=dtype), randn(inputs, dtype=dtype)
    # Each kind of norm with zero points or without.
    for before, symmetric in (((None, None, 0.0), True), ((None, norm, 1e-5), False), ((residual, norm, 1e-5), True)):
        symmetric ^= plan == PLANS[1]
        weight = random_weight(outputs, inputs, group, symmetric=symmetric, device=device)
        sum_ = x if before[0] is None else x + residual
        factor = torch.rsqrt(sum_.double().square().mean() + 1e-5)
        normed = sum_.double() if before[1] is None else sum_.double() * factor * norm
        expected = normed @ weight.dequantised().double().T
        y, total = linear_int4_stream(x, before, weight, bias, None, plan=plan)
        check_close(y, (expected + bias.double()).to(dtype), terms=inputs)
        assert total is x if before[0] is None else torch.equal(total, sum_)
        gate, up = expected.chunk(2, dim=1)
        y, _ = linear_int4_stream(x, before, weight, None, "silu", plan=plan)
        check_close(y, (torch.nn.functional.silu(gate) * up).to(dtype), terms=inputs)


@on_hopper
def test_every_number_in_every_place(device):
    """Of each row, alone; zero points are taken off by themselves."""
    from rayllm_kernels.quantised.int4_stream_kernel import linear_int4_stream

    inputs = 512
    k, number = torch.meshgrid(torch.arange(inputs, device=device), torch.arange(16, device=device), indexing="ij")
    codes = torch.zeros(inputs, 16, inputs // 2, dtype=torch.uint8, device=device)
    codes.scatter_(2, (k % 256)[..., None], (number << 4 * (k // 256))[..., None].to(torch.uint8))
    scales = torch.exp2(torch.arange(16.0, device=device) % 4)[:, None].repeat(1, 16 * inputs)
    weight = Int4Weight(codes.flatten(0, 1), scales, torch.zeros_like(scales, dtype=torch.uint8), inputs, 32)
    x = (1 + torch.arange(inputs, device=device) % 251).half()[None]
    y, _ = linear_int4_stream(x, (None, None, 0.0), weight, None, None)
    assert torch.equal(y, (x.float() @ weight.dequantised().T).half())


@on_hopper
@pytest.mark.parametrize("size", [1e-12, 1e-3, 1e4, 1e12])
def test_tokens_of_any_size(randn, size):
    """Numbers are denormal, products are not."""
    from rayllm_kernels.quantised.int4_stream_kernel import linear_int4_stream

    x = size * randn(1, 512, dtype=torch.bfloat16)
    weight, norm = random_weight(33, 512, 32, symmetric=False, device=x.device), randn(512, dtype=torch.bfloat16)
    y, _ = linear_int4_stream(x, (None, None, 0.0), weight, None, None)
    check_close(y, (x.double() @ weight.dequantised().double().T).to(y.dtype), terms=512)
    normed = x.double() * torch.rsqrt(x.double().square().mean()) * norm
    y, _ = linear_int4_stream(x, (None, norm, 0.0), weight, None, None)
    check_close(y, (normed @ weight.dequantised().double().T).to(y.dtype), terms=512)


@on_hopper
def test_back_to_back(randn, kernels):
    """200 products, each of what the one before gave, so that kernels overlap."""
    first, norm = randn(1, 4096, dtype=torch.bfloat16), (randn(4096, dtype=torch.bfloat16), 1e-5)
    weight = random_weight(4096, 4096, 128, symmetric=True, device=first.device)
    assert plans.int4_stream_takes(first, weight.codes, HERE)

    def chain():
        x = total = first
        for _ in range(200):
            x, total = kernels.fused_linear_int4(x, weight, norm=norm, residual=total)
        return x

    assert torch.equal(chain(), chain())


def test_which_weights_it_is_given():
    hopper = HERE._replace(capability=(9, 0))

    def takes(tokens=1, inputs=4096, dtype=torch.bfloat16, gpu=hopper):
        x = torch.empty(tokens, inputs, dtype=dtype, device="meta")
        return plans.int4_stream_takes(x, random_weight(64, inputs, 32, symmetric=True, device="meta").codes, gpu)

    assert takes()
    assert not takes(tokens=2)
    assert not takes(inputs=4096 + 64)
    assert not takes(inputs=65536)
    assert not takes(dtype=torch.float32)
    assert not takes(gpu=hopper._replace(capability=(10, 0)))


COMPILE = """
from rayllm_kernels.device import Hardware
from rayllm_kernels.quantised import int4_stream_kernel, plans

known = set()
for inputs, rows, group, act, normed in ((4096, 256, 128, "silu", True), (14336, 256, 32, None, False)):
    x = torch.zeros(1, inputs, dtype=torch.bfloat16)
    scales = torch.ones(inputs // group, rows)
    codes = torch.zeros(rows, inputs // 2, dtype=torch.uint8)
    weight = Int4Weight(codes, scales, scales.to(torch.uint8), inputs, group)
    plan = plans.plan_int4_stream(Hardware(132, 227 << 10, (9, 0)))
    with ops.compile_only():
        norm = (x, x[0], 1e-5) if normed else (None, None, 0.0)
        int4_stream_kernel.linear_int4_stream(x, norm, weight, None, act, plan=plan)
    [kernel] = set(int4_stream_kernel._int4_stream_kernel.device_caches[0][0].values()) - known
    known.add(kernel)
    print(kernel.asm["ptx"].count("mma.sync"), kernel.metadata.shared, plan.programs // 132)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernel itself")
def test_the_kernel_compiles_and_fits(run_compiler, tmp_path):
    """Gluon has no interpreter; the planned programs must fit a multiprocessor."""
    for line in run_compiler(COMPILE, TRITON_CACHE_DIR=str(tmp_path)).splitlines():
        products, shared, programs = map(int, line.split())
        assert products > 0
        assert programs * (shared + 1024) <= 228 << 10  # bytes of a multiprocessor, of which each program costs 1,024
    waits = [wait for cubin in tmp_path.rglob("_int4_stream_kernel.cubin") for wait in stages_that_wait(cubin)]
    assert len(waits) == 2 + 7  # stages of a tile
    assert all(waits)


STAGE_REGISTERS = 16 + 4  # that a thread loads of a stage, codes and scales


def stages_that_wait(cubin):
    """For each stage that consumers give free, whether instructions before their barrier read a register of each load.

    Such an instruction waits for the load; a barrier does not.
    """
    from triton import knobs

    command = [knobs.nvidia.cuobjdump.path, "-sass", str(cubin)]
    code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    loaded, used, barrier = [], set(), False
    for line in re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", code, re.MULTILINE):
        if "SYNCS.PHASECHK" in line:
            loaded, used, barrier = [], set(), False
        elif load := re.match(r"LDS(M?)(?:\.\w+)*?(?:\.(128|2))? R(\d+),", line):
            count = (int(load[2]) if load[1] else int(load[2]) // 32) if load[2] else 1
            registers = set(range(int(load[3]), int(load[3]) + count))
            loaded.append(registers)
            used -= registers
        elif line.startswith("BAR.SYNC"):
            barrier = True
        elif "SYNCS.ARRIVE.TRANS64.A1T0" in line and loaded:
            yield sum(map(len, loaded)) == STAGE_REGISTERS and all(used & registers for registers in loaded)
            loaded = []
        elif not barrier:
            used |= {int(register) for register in re.findall(r"R(\d+)", line.partition(",")[2])}


@on_hopper
@pytest.mark.parametrize(("group", "symmetric"), [(32, False), (32, True), (128, True)])
def test_slow_scales(randn, device, repeated, group, symmetric):
    """Loads of scales from memory delay the loads of codes behind them; no stage may be copied over before those."""
    from rayllm_kernels.quantised.int4_stream_kernel import linear_int4_stream

    weight = random_weight(4096, 14336, group, symmetric=symmetric, device=device)
    x = randn(1, 14336, dtype=torch.bfloat16)
    expected = (x.double() @ weight.dequantised().double().T).bfloat16()
    for _ in range(30):
        y = repeated(lambda: linear_int4_stream(x, (None, None, 0.0), weight, None, None)[0])
        check_close(y, expected, terms=14336)
