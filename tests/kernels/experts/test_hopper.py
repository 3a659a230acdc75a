"""The experts' products of many tokens on Hopper, against those of any GPU, in the model's dtype and in e4m3."""

from __future__ import annotations

import pytest
import torch
from support.closeness import check_close

from rayllm_kernels import ops
from rayllm_kernels.device import Hardware
from rayllm_kernels.experts.plans import HOPPER_ROWS, hopper_takes

ON_GPU = torch.cuda.is_available()
on_hopper = pytest.mark.skipif(
    not ON_GPU or torch.cuda.get_device_capability() != (9, 0), reason="the kernel is written for Hopper"
)
# tokens, experts, top_k, hidden, inner: tiles of rows that are full, and whose consumers have few rows or none; K and
# outputs that are no multiples of a stage and of a tile; more tiles than programs.
SHAPES = [(900, 4, 2, 256, 128), (333, 3, 1, 80, 144), (1000, 8, 3, 336, 208), (5000, 16, 4, 512, 384)]


@pytest.fixture
def case(randn):
    """(tokens, experts, top_k, hidden, inner, dtype) -> x, weights, experts, gate_up, down."""

    def make(tokens, num_experts, top_k, hidden, inner, dtype):
        x = randn(tokens, hidden + 8, dtype=dtype)[:, :hidden]
        gate_up = randn(num_experts, 2 * inner, hidden).mul_(2 * hidden**-0.5).to(dtype)
        down = randn(num_experts, hidden, inner).mul_(inner**-0.5).to(dtype)
        scores = randn(tokens, num_experts)
        scores[:, 0] += 1  # one has more than others
        weights, experts = scores.softmax(-1).topk(top_k)
        return x, weights.contiguous(), experts.to(torch.int32), gate_up, down

    return make


@pytest.fixture
def used(monkeypatch):
    """The rows of the tiles that were asked for."""
    from rayllm_kernels.experts import group_kernel

    rows, group = [], group_kernel.group
    monkeypatch.setattr(group_kernel, "group", lambda *given, **named: rows.append(given[2]) or group(*given, **named))
    return rows


def in_torch(x, weights, experts, gate_up, down, **options):
    """By the reference, in fp32 on the CPU but for x's dtype, in which it rounds."""
    moved = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    return ops.experts(*(part.cpu() for part in (x, weights, experts, gate_up, down)), **moved).to(x.device)


@on_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_values(case, used, shape, dtype):
    arguments = case(*shape, dtype)
    check_close(ops.experts(*arguments), in_torch(*arguments), terms=shape[3] + shape[4] * shape[2], slack=2)
    assert used == [HOPPER_ROWS]


@on_hopper
def test_biases_activations_and_experts_of_others(case, used, randn):
    x, weights, experts, gate_up, down = case(1000, 4, 2, 192, 176, torch.bfloat16)
    biases = {name: randn(4, size, dtype=x.dtype) for name, size in (("gate_up_bias", 352), ("down_bias", 192))}
    for options in ({"clamp": (1.7, 0.8)}, {"act": "gelu"}, {"act": "gelu_pytorch_tanh"}):
        y = ops.experts(x, weights, experts, gate_up, down, **biases, **options)
        check_close(y, in_torch(x, weights, experts, gate_up, down, **biases, **options), terms=600, slack=2)
    total = torch.zeros(x.shape, device=x.device)
    for first, end in ((0, 1), (1, 4)):
        own = [each[first:end].contiguous() for each in (gate_up, down)]
        total += ops.experts(x, weights, experts, *own, owned=ops.ExpertRange(first, 4)).float()
    check_close(total.to(x.dtype), in_torch(x, weights, experts, gate_up, down), terms=600, slack=3)
    assert set(used) == {HOPPER_ROWS}


@on_hopper
@pytest.mark.parametrize("shape", SHAPES)
def test_e4m3_gives_what_other_tiles_give(case, used, monkeypatch, shape):
    from rayllm_kernels.experts import group_kernel

    x, weights, experts, *dense = case(*shape, torch.bfloat16)

    def quantised(weight):
        scales = weight.float().abs().amax(-1, keepdim=True) / 448
        codes = (weight.float() / scales).to(torch.float8_e4m3fn).view(torch.uint8)
        return ops.ExpertWeight("fp8", codes, scales, None, weight.shape[2], None)

    arguments = x, weights, experts, *map(quantised, dense)
    y = ops.experts_quantised(*arguments, fp8_tokens=True)
    monkeypatch.setattr(group_kernel, "HOPPER_FROM", float("inf"))
    expected = ops.experts_quantised(*arguments, fp8_tokens=True)
    assert used[0] == HOPPER_ROWS
    assert used[1] != HOPPER_ROWS
    assert (y.float() - expected.float()).norm() <= 0.01 * expected.float().norm()


@on_hopper
def test_captured_launches_give_the_same(case):
    """Behind one another in a graph: what a launch reads is there when its predecessor is done."""
    arguments = case(1500, 6, 2, 256, 256, torch.bfloat16)
    expected = ops.experts(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.experts(*arguments)
    for _ in range(10):
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, expected)


def test_what_tensor_copies_cannot_read_is_left_to_others():
    hopper = Hardware(132, 227 << 10, (9, 0))
    gate_up, down = torch.zeros(2, 64, 32, dtype=torch.bfloat16), torch.zeros(2, 32, 32, dtype=torch.bfloat16)
    assert hopper_takes(gate_up, down, hopper)
    assert not hopper_takes(gate_up, down, hopper._replace(capability=(10, 0)))
    assert not hopper_takes(gate_up.float(), down.float(), hopper)
    assert not hopper_takes(gate_up, down[:, :, :20].contiguous(), hopper)
    assert not hopper_takes(gate_up, down[:, :, :24], hopper)


COMPILE = """
from rayllm_kernels.device import Hardware, assumed
from rayllm_kernels.experts.hopper_kernel import _experts_hopper_kernel

meta = torch.device("meta")
empty = lambda *shape, dtype=torch.bfloat16: torch.empty(shape, dtype=dtype, device=meta)
x, gate_up, down = empty(2000, 256), empty(4, 512, 256), empty(4, 256, 256)
routed = empty(2000, 2, dtype=torch.float32), empty(2000, 2, dtype=torch.int32)
codes = [empty(*each.shape, dtype=torch.uint8) for each in (gate_up, down)]
scales = [empty(*each.shape[:2], 1, dtype=torch.float32) for each in codes]
e4m3 = [ops.ExpertWeight("fp8", *each, None, 256, None) for each in zip(codes, scales)]
with assumed(meta, Hardware(132, 227 << 10, (9, 0))), dispatch.forced(triton=True), ops.compile_only():
    ops.experts(x, *routed, gate_up, down)
    ops.experts_quantised(x, *routed, *e4m3, fp8_tokens=True)
for kernel in _experts_hopper_kernel.device_caches[0][0].values():
    print(kernel.asm["ptx"].count("wgmma.mma"), kernel.metadata.shared)
"""


@pytest.mark.skipif(ON_GPU, reason="a GPU runs the kernel itself")
def test_the_kernel_compiles_and_fits(run_compiler, tmp_path):
    """Gluon has no interpreter, and its API moves: at least, every version of Triton must build the kernel."""
    lines = run_compiler(COMPILE, TRITON_CACHE_DIR=str(tmp_path)).splitlines()
    assert len(lines) == 4, "each product, in either dtype"
    for line in lines:
        products, shared = map(int, line.split())
        assert products > 0
        assert shared <= 227 << 10  # bytes that a program may take
