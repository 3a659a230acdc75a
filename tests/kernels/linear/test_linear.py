"""Projections of few tokens: both kernels, every tile that they may be given, and the dispatch between them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from support.capabilities import HERE
from support.closeness import check_close

from rayllm_kernels.linear.plans import MIN_SHARED_MEMORY, choose_rows, choose_tiles, rows_take

ON_GPU = torch.cuda.is_available()
ACTS = {"gelu": F.gelu, "gelu_new": partial(F.gelu, approximate="tanh"), "silu": F.silu}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# tokens, outputs, inputs
SHAPES = [
    (1, 5, 64),
    (2, 16, 100),
    (2, 6, 1100),
    (3, 33, 1),
    (4, 8, 513),
    (7, 40, 96),
    (17, 24, 130),
    (64, 17, 64),
    (70, 9, 32),
]
if ON_GPU:
    SHAPES += [(m, n, k) for m in (1, 2, 3, 4, 8, 13, 32, 64) for n, k in ((1024, 3072), (4096, 1024), (5000, 2056))]
    SHAPES += [(1, 4096, 14336), (16, 4096, 14336), (100, 1024, 512)]
# The interpreter multiplies the bits of bf16 matrices as if they were integers.
CASES = [(*shape, dtype) for shape in SHAPES for dtype in DTYPES if ON_GPU or shape[0] < 3 or dtype != torch.bfloat16]


@pytest.mark.parametrize(("tokens", "outputs", "inputs", "dtype"), CASES)
def test_linear(randn, scaled, kernels, tokens, outputs, inputs, dtype):
    x, bias = randn(tokens, inputs, dtype=dtype), randn(outputs, dtype=dtype)
    weight = scaled(outputs, inputs, dtype)
    exact = x.double() @ weight.double().T
    check_close(kernels.linear(x, weight), exact.to(dtype), terms=inputs)
    check_close(kernels.linear(x, weight, bias), (exact + bias.double()).to(dtype), terms=inputs)
    assert torch.equal(kernels.linear(x, weight, bias), kernels.linear(x, weight, bias))


@pytest.mark.parametrize("tokens", [1, 4, 70])
def test_a_result_goes_where_it_is_wanted(randn, scaled, kernels, tokens):
    x, weight, bias = randn(tokens, 64), scaled(24, 64, torch.float32), randn(24)
    room = randn(tokens + 1, 24)
    last = room[tokens].clone()
    out = kernels.linear(x, weight, bias, out=room[:tokens])
    assert out.data_ptr() == room.data_ptr()
    check_close(room[:tokens], kernels.linear(x, weight, bias), terms=64)
    assert torch.equal(room[tokens], last)


@pytest.mark.parametrize("tokens", [3, 100])
def test_a_result_with_a_bias_is_rounded_once_wherever_it_goes(randn, scaled, kernels, tokens):
    x, weight, bias = (
        randn(tokens, 64, dtype=torch.bfloat16),
        scaled(96, 64, torch.bfloat16),
        randn(96, dtype=torch.bfloat16),
    )
    room = torch.empty(tokens, 96, dtype=torch.bfloat16, device=x.device)
    assert torch.equal(kernels.linear(x, weight, bias, out=room), kernels.linear(x, weight, bias))


@pytest.mark.parametrize(("tokens", "outputs", "inputs", "dtype"), CASES)
def test_linear_act_mul(randn, scaled, kernels, tokens, outputs, inputs, dtype):
    act = sorted(ACTS)[tokens % 3]
    x, weight = randn(tokens, inputs, dtype=dtype), 2 * scaled(2 * outputs, inputs, dtype)
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=1)
    check_close(kernels.linear_act_mul(x, weight, act), (ACTS[act](gate) * up).to(dtype), terms=inputs)


def exact_norm(reference, x, weight, eps, rounded):
    """In float64; of numbers rounded to x's dtype if `rounded`, as two kernels store them in between."""
    if rounded:
        return reference.rms_norm(x, weight, eps).double()
    wide = x.double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.double()


@pytest.mark.parametrize(("tokens", "outputs", "inputs", "dtype"), CASES)
@pytest.mark.parametrize("with_residual", [True, False])
def test_add_rms_norm_linear(randn, scaled, kernels, reference, tokens, outputs, inputs, dtype, with_residual):
    x, norm_weight = 3 * randn(tokens, inputs, dtype=dtype), randn(inputs, dtype=dtype)
    residual = 5 * randn(tokens, inputs, dtype=dtype) if with_residual else None
    weight, bias = scaled(2 * outputs, inputs, dtype), randn(2 * outputs, dtype=dtype)
    before = x.clone()
    expected_total = x if residual is None else x + residual
    # The kernel of very few tokens has the norm in it.
    normed = exact_norm(reference, expected_total, norm_weight, 1e-5, not rows_take(x, weight, norm=True))
    exact = normed @ weight.double().T
    y, total = kernels.add_rms_norm_linear(x, residual, norm_weight, 1e-5, weight, bias)
    check_close(total, expected_total)
    check_close(y, (exact + bias.double()).to(dtype), terms=inputs)
    act = sorted(ACTS)[tokens % 3]
    y, total = kernels.add_rms_norm_linear(x, residual, norm_weight, 1e-5, weight, act=act)
    check_close(total, expected_total)
    gate, up = exact.chunk(2, dim=1)
    check_close(y, (ACTS[act](gate) * up).to(dtype), terms=inputs)
    assert torch.equal(x, before)


@pytest.mark.parametrize("tokens", [1, 2, 6])
def test_strided_arguments(randn, scaled, kernels, reference, tokens):
    """Slices of wider buffers, aligned and not; a single row may have any stride."""
    for offset in (0, 8, 3):
        x = randn(tokens, 80, dtype=torch.float16)[:, offset : offset + 64]
        residual = randn(tokens, 100, dtype=torch.float16)[:, 1:65]
        weight = scaled(24, 72, torch.float16)[:, offset : offset + 64]
        norm_weight = randn(64, dtype=torch.float16)
        check_close(kernels.linear(x, weight), reference.linear(x, weight), terms=64)
        check_close(kernels.linear_act_mul(x, weight, "gelu"), reference.linear_act_mul(x, weight, "gelu"), terms=64)
        actual = kernels.add_rms_norm_linear(x, residual, norm_weight, 1e-6, weight)
        for ours, theirs in zip(
            actual, reference.add_rms_norm_linear(x, residual, norm_weight, 1e-6, weight), strict=True
        ):
            check_close(ours, theirs, terms=64)


def test_empty_batches(randn, kernels):
    x, weight = randn(0, 32), randn(8, 32)
    assert kernels.linear(x, weight).shape == (0, 8)
    assert kernels.linear_act_mul(x, weight, "silu").shape == (0, 4)
    y, total = kernels.add_rms_norm_linear(x, x, randn(32), 1e-6, weight)
    assert y.shape == (0, 8)
    assert total.shape == (0, 32)


def test_large_activations_do_not_overflow_fp16(randn, scaled, kernels, reference):
    """The norm's factor is applied last: what is multiplied before must not need fp16's range."""
    x = 3e3 * randn(1, 64, dtype=torch.float16)
    norm_weight = 30 * randn(64).abs().half()
    weight = scaled(16, 64, torch.float16)
    y, _ = kernels.add_rms_norm_linear(x, None, norm_weight, 1e-6, weight)
    check_close(y, reference.add_rms_norm_linear(x, None, norm_weight, 1e-6, weight)[0], terms=64)


def weights_and_product(scaled, reference, x, gated):
    """A weight of odd sizes, and what is expected of it."""
    weight = scaled(84, x.shape[1], torch.float16)
    return weight, reference.linear_act_mul(x, weight, "gelu_new") if gated else reference.linear(x, weight)


@pytest.mark.parametrize("gated", [False, True])
def test_every_choice_of_rows(randn, scaled, reference, gated):
    from rayllm_kernels.linear.linear import NO_NORM
    from rayllm_kernels.linear.rows_kernel import linear_rows

    sizes = [(m, k) for m in (1, 2) for k in (256, 2048, 4096)]
    choices = {choose_rows(*size, gated=gated, norm=norm) for size in sizes for norm in (False, True)}
    for tokens, inputs in ((1, 700), (2, 1024)):
        x = randn(tokens, inputs, dtype=torch.float16)
        weight, expected = weights_and_product(scaled, reference, x, gated)
        for choice in sorted(choices):
            y, _total = linear_rows(x, weight, choice, None, NO_NORM, "gelu_tanh" if gated else None, None)
            check_close(y, expected, terms=inputs)


@pytest.mark.skipif(HERE.shared_memory < MIN_SHARED_MEMORY, reason="needs a GPU that has room for these tiles")
@pytest.mark.parametrize("gated", [False, True])
def test_every_tile_that_may_be_chosen(randn, scaled, reference, gated):
    from rayllm_kernels.linear.tiles_kernel import linear_tiles

    tiles = {choose_tiles(m, n, gated, 132) for m in (4, 32, 64) for n in (256, 4096, 28672)}
    for tokens, inputs in ((1, 700), (5, 1024)):
        x = randn(tokens, inputs, dtype=torch.float16)
        weight, expected = weights_and_product(scaled, reference, x, gated)
        for tile in sorted(tiles):
            check_close(linear_tiles(x, weight, tile, act="gelu_tanh" if gated else None), expected, terms=inputs)


@pytest.mark.skipif(not ON_GPU, reason="needs CUDA graphs")
@pytest.mark.parametrize("tokens", [1, 2, 4, 8, 33])
def test_a_captured_chain_equals_the_eager_one(randn, scaled, kernels, reference, tokens):
    """Overlapping launches: each kernel reads what the one before it wrote, many times over."""
    hidden, inter, dtype = 1024, 3072, torch.bfloat16
    shapes = (hidden, hidden), (2 * inter, hidden), (hidden, inter)
    layers = [[scaled(*shape, dtype) for shape in shapes] for _ in range(4)]
    norm_weight = 1 + 0.1 * randn(hidden, dtype=dtype)
    start = randn(tokens, hidden, dtype=dtype)

    def chain(module) -> torch.Tensor:
        x, residual = start, start
        for attention, gate_up, down in layers:
            y, residual = module.add_rms_norm_linear(x, residual, norm_weight, 1e-6, attention)
            x = module.linear(y, attention)
            y, residual = module.add_rms_norm_linear(x, residual, norm_weight, 1e-6, gate_up, act="silu")
            x = module.linear(y, down)
        return x + residual

    expected = chain(kernels)
    off = (expected - chain(reference)).norm(dim=1) / expected.norm(dim=1)
    assert float(off.max()) < 4e-2  # of each row, after sixteen products
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain(kernels)
    for _ in range(20):
        captured.fill_(float("nan"))
        graph.replay()
        assert torch.equal(captured, expected)
