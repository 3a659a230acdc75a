"""The gated Hopper projection of many tokens: both tiles, odd shapes, and which projections it is given."""

from __future__ import annotations

import pytest
import torch
from support.closeness import check_close

from rayllm_kernels.linear.plans import plan_gated

ON_GPU = torch.cuda.is_available()
HOPPER = ON_GPU and torch.cuda.get_device_capability() == (9, 0)
on_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
# tokens, outputs, inputs: tails of every dimension, one tile in all, one stage in all, rounds that are not full
SHAPES = [(1, 8, 8), (64, 128, 64), (193, 1000, 520), (577, 136, 1096), (1000, 3072, 1024), (2100, 3584, 4096)]


def operands(randn, tokens, outputs, inputs, dtype):
    weight = randn(2 * outputs, inputs).mul_(2 * inputs**-0.5).to(dtype)
    return randn(tokens, inputs, dtype=dtype), weight


def poison(like):
    """NaN in the memory that the allocator hands out next for a tensor of this shape."""
    torch.full_like(like, float("nan"))


@on_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("consumers", [2, 3])
@pytest.mark.parametrize(("tokens", "outputs", "inputs"), SHAPES)
def test_both_tiles_by_any_number_of_programs(randn, tokens, outputs, inputs, consumers, dtype):
    from rayllm_kernels.linear.gated_hopper_kernel import linear_gated_hopper

    x, weight = operands(randn, tokens, outputs, inputs, dtype)
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=1)
    expected = (gate * torch.sigmoid(gate) * up).to(dtype)
    for programs in (1, 7, 132):
        poison(expected)
        y = linear_gated_hopper(x, weight, consumers, programs, act="silu")
        check_close(y, expected, terms=inputs)
        assert torch.equal(y, linear_gated_hopper(x, weight, 5 - consumers, 132, act="silu"))  # sums in the same order


@on_hopper
def test_large_gates_do_not_overflow(randn):
    from rayllm_kernels.linear.gated_hopper_kernel import linear_gated_hopper

    x, weight = operands(randn, 200, 128, 256, torch.bfloat16)
    y = linear_gated_hopper(x, 200 * weight, 2, 132, act="silu")
    assert y.isfinite().all()
    assert (y == 0).any()  # exp(-gate) is infinite for some


@on_hopper
def test_strided_rows_are_read_and_the_rest_of_them_is_not(randn, kernels, reference):
    tokens, outputs, inputs = 1024, 8192, 1024
    assert plan_gated(tokens, 2 * outputs, inputs, torch.cuda.get_device_properties(0).multi_processor_count)
    x, weight = operands(randn, tokens, outputs, inputs, torch.bfloat16)
    wide_x, wide_weight = (
        torch.full((t.shape[0], inputs + 128), float("nan"), device=t.device, dtype=t.dtype) for t in (x, weight)
    )
    wide_x[:, 64:-64], wide_weight[:, 64:-64] = x, weight
    y = kernels.linear_act_mul(wide_x[:, 64:-64], wide_weight[:, 64:-64], "gelu_new")
    check_close(y, reference.linear_act_mul(x, weight, "gelu_new"), terms=inputs)
    assert torch.equal(y, kernels.linear_act_mul(x, weight, "gelu_new"))


@on_hopper
def test_a_chain_of_layers_that_overlap(randn, kernels):
    """Each layer reads what the one before it wrote, launched early and replayed as a graph."""
    x, weight = operands(randn, 1024, 2048, 2048, torch.bfloat16)
    weights = [weight.roll(i, 0) for i in range(4)]
    norm = torch.ones(2048, device=x.device, dtype=x.dtype)

    def run(pause):
        y, total = x, None
        for w in weights:
            y, total = kernels.add_rms_norm_linear(y, total, norm, 1e-5, w, act="silu")
            pause()
        return y

    expected = run(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run(lambda: None)
    for _ in range(20):
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, expected)


COMPILE = """
from rayllm_kernels.linear.gated_hopper_kernel import _linear_gated_kernel, linear_gated_hopper

x, weight = torch.zeros(100, 128, dtype=torch.bfloat16), torch.zeros(512, 128, dtype=torch.bfloat16)
with ops.compile_only():
    linear_gated_hopper(x, weight, 2, 132, act="gelu_tanh")
for kernel in _linear_gated_kernel.device_caches[0][0].values():
    print(kernel.asm["ptx"].count("wgmma.mma"), kernel.metadata.shared)
"""


@pytest.mark.skipif(ON_GPU, reason="a GPU runs the kernel itself")
def test_the_kernel_compiles_and_fits(run_compiler, tmp_path):
    """Gluon has no interpreter, and its API moves: at least, every version of Triton must build the kernel."""
    lines = run_compiler(COMPILE, TRITON_CACHE_DIR=str(tmp_path)).splitlines()
    assert len(lines) == 2, "the first call compiles for both numbers of consumers"
    for line in lines:
        products, shared = map(int, line.split())
        assert products > 0
        assert shared <= 227 << 10  # bytes that a program may take
