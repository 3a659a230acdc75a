"""Products whose rows do not know of each other: right values, and the same bits in every batch."""

from __future__ import annotations

import pytest
import torch
from support.closeness import check_close

from rayllm_kernels.linear.plans import choose_invariant_tiles

ON_GPU = torch.cuda.is_available()
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# tokens, outputs, inputs
SHAPES = [(1, 5, 64), (2, 16, 100), (3, 33, 1), (17, 24, 130), (40, 17, 64), (70, 9, 32)]
if ON_GPU:
    SHAPES += [(m, n, k) for m in (1, 16, 33, 64, 300) for n, k in ((1024, 3072), (4096, 1024), (5000, 2056))]
    SHAPES += [(2000, 6144, 1024), (8192, 4096, 512)]
# The interpreter multiplies the bits of bf16 matrices as if they were integers.
CASES = [(*shape, dtype) for shape in SHAPES for dtype in DTYPES if ON_GPU or dtype != torch.bfloat16]
only_gpu = pytest.mark.skipif(not ON_GPU, reason="compares the bits of tensor cores")


def uneven(randn, tokens, inputs, dtype):
    """Rows of numbers of very different sizes, whose sums show every change of order."""
    return (randn(tokens, inputs) * torch.exp2(4 * randn(tokens, inputs)).clamp(max=1e3)).to(dtype)


def tiles_of(dtype):
    """Every choice of tiles, by numbers of tokens and outputs that lead to it."""
    sizes = [(m, n) for m in (1, 17, 33, 65, 256, 1024, 8192) for n in (64, 1024, 4096, 6144, 28672)]
    return sorted({choose_invariant_tiles(m, n, dtype, 132) for m, n in sizes})


@pytest.mark.parametrize(("tokens", "outputs", "inputs", "dtype"), CASES)
def test_values(randn, scaled, kernels, tokens, outputs, inputs, dtype):
    x, bias = randn(tokens, inputs, dtype=dtype), randn(outputs, dtype=dtype)
    weight = scaled(outputs, inputs, dtype)
    exact = x.double() @ weight.double().T
    check_close(kernels.linear_invariant(x, weight), exact.to(dtype), terms=inputs)
    check_close(kernels.linear_invariant(x, weight, bias), (exact + bias.double()).to(dtype), terms=inputs)


@pytest.mark.parametrize("dtype", DTYPES if ON_GPU else [torch.float32, torch.float16])
def test_every_tile_that_may_be_chosen(randn, scaled, reference, dtype):
    from rayllm_kernels.linear.invariant_kernel import can_copy, multiply

    for tokens, outputs, inputs in ((5, 40, 72), (70, 40, 136)) if not ON_GPU else ((300, 4096, 2048), (77, 136, 1000)):
        x, weight, bias = uneven(randn, tokens, inputs, dtype), scaled(outputs, inputs, dtype), randn(outputs)
        all_tiles = tiles_of(dtype)
        copies = can_copy(x) and can_copy(weight)
        all_tiles += [tiles._replace(copied=False) for tiles in all_tiles if tiles.copied]
        results = [multiply(x, weight, bias.to(dtype), tiles) for tiles in all_tiles if copies or not tiles.copied]
        for y in results:
            if ON_GPU:
                assert torch.equal(y, results[0])
            else:
                check_close(y, results[0], terms=inputs)
        check_close(results[0], reference.linear_invariant(x, weight, bias.to(dtype)), terms=inputs)


def check_rows(linear, x, weight, sizes):
    """Rows of x, multiplied in batches of every size and at other places, against the whole product."""
    whole = linear(x, weight)
    for size in sizes:
        first = (7 * size) % (x.shape[0] - size + 1)
        assert torch.equal(linear(x[first : first + size], weight), whole[first : first + size]), size
    order = torch.randperm(x.shape[0], generator=torch.Generator().manual_seed(3)).to(x.device)
    assert torch.equal(linear(x[order], weight), whole[order])
    for place in (0, 1, 8, 15, 16, 63, 100, 127):
        others = torch.randn_like(x[:200])
        others[place] = x[5]
        assert torch.equal(linear(others, weight)[place], whole[5]), place


@only_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(1024, 2048), (4096, 1024), (6144, 4096), (1000, 1032)])
def test_a_row_is_the_same_in_every_batch(randn, scaled, kernels, outputs, inputs, dtype):
    x, weight = uneven(randn, 300, inputs, dtype), scaled(outputs, inputs, dtype)
    check_rows(kernels.linear_invariant, x, weight, range(1, 301))


@only_gpu
def test_a_row_is_the_same_in_a_large_batch(randn, scaled, kernels):
    x, weight = uneven(randn, 8192, 1024, torch.bfloat16), scaled(6144, 1024, torch.bfloat16)
    whole = kernels.linear_invariant(x, weight)
    for size in (1, 40, 300, 1000, 3000, 5000):
        assert torch.equal(kernels.linear_invariant(x[-size:], weight), whole[-size:]), size


@pytest.mark.parametrize("dtype", DTYPES)
def test_reference_rows_are_the_same_in_every_batch(reference, dtype):
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 104, generator=generator).to(dtype) for n in (240, 72))
    check_rows(reference.linear_invariant, x, weight, (1, 2, 3, 17, 64, 130, 240))


@pytest.mark.parametrize("tokens", [1, 6, 100])
def test_strided_arguments(randn, scaled, kernels, reference, tokens):
    """Slices of wider buffers, aligned for tensor copies and not."""
    for offset in (0, 8, 3):
        x = randn(tokens, 80, dtype=torch.float16)[:, offset : offset + 64]
        weight = scaled(24, 72, torch.float16)[:, offset : offset + 64]
        check_close(kernels.linear_invariant(x, weight), reference.linear_invariant(x, weight), terms=64)


def test_empty_batches(randn, each):
    assert each.linear_invariant(randn(0, 32), randn(8, 32)).shape == (0, 8)


@only_gpu
@pytest.mark.parametrize("tokens", [1, 8, 300, 3000])
def test_captured_equals_eager(randn, scaled, kernels, tokens):
    x, weight = randn(tokens, 1024, dtype=torch.bfloat16), scaled(4096, 1024, torch.bfloat16)
    expected = kernels.linear_invariant(x, weight)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kernels.linear_invariant(x, weight)
    for _ in range(3):
        captured.fill_(float("nan"))
        graph.replay()
        assert torch.equal(captured, expected)
