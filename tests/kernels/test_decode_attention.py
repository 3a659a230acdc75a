"""The Triton decode attention against its reference."""

from __future__ import annotations

import pytest
import torch

from rayllm_kernels import reference

ON_GPU = torch.cuda.is_available()
# The interpreter's `tl.dot` multiplies bf16 bit patterns as integers: there, fp16 takes the place of bf16.
BRAIN = torch.bfloat16 if ON_GPU else torch.float16

# (context lengths, (query heads, KV heads), head size, block size, dtype)
SHAPES = [
    ([37, 1, 64, 0, 130], (4, 2), 64, 16, torch.float32),
    ([1], (1, 1), 32, 1, torch.float32),
    ([15, 16, 17], (4, 4), 32, 8, BRAIN),
    ([70, 3], (8, 1), 80, 16, BRAIN),
    ([65], (7, 1), 96, 32, torch.float16),
    ([90, 31], (14, 2), 112, 64, torch.float32),
    ([140], (4, 1), 128, 128, BRAIN),
    ([66], (2, 1), 256, 16, torch.float32),
    ([66], (2, 1), 256, 16, BRAIN),
    ([50], (71, 1), 64, 16, torch.float32),
    ([41], (6, 3), 64, 5, torch.float16),
]
if ON_GPU:
    SHAPES += [
        ([4096, 1, 1777, 0, 2048, 333], (32, 8), 128, 16, torch.bfloat16),
        ([4096, 1, 1777, 0, 2048, 333], (32, 8), 128, 16, torch.float32),
        ([1000 + 37 * i for i in range(64)], (16, 8), 128, 16, torch.bfloat16),
        ([9000], (28, 4), 128, 32, torch.float16),
        ([20000], (8, 2), 80, 16, torch.bfloat16),
        ([3000, 5000], (16, 1), 256, 64, torch.bfloat16),
        ([700] * 300, (8, 8), 64, 16, torch.float16),
    ]


@pytest.mark.parametrize("num_splits", [1, 3, None])
@pytest.mark.parametrize(("seq_lens", "heads", "head_dim", "block_size", "dtype"), SHAPES)
def test_shapes(paged_case, assert_kernel_close, kernels, seq_lens, heads, head_dim, block_size, dtype, num_splits):
    case = paged_case(seq_lens, heads=heads, head_dim=head_dim, block_size=block_size, dtype=dtype, spread=2.0)
    # The output is a strided slice, too.
    out = torch.full((len(seq_lens), heads[0] + 1, head_dim), float("nan"), dtype=dtype, device=case.q.device)[:, 1:]
    assert case.decode(kernels, num_splits=num_splits, out=out) is out
    assert_kernel_close(out, case.decode(reference))
    for row, length in enumerate(seq_lens):
        assert length > 0 or not out[row].any()


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("window", [None, 1, 40, 64, 500])
@pytest.mark.parametrize("soft_cap", [None, 3.0])
@pytest.mark.parametrize("alibi", [False, True])
def test_options(paged_case, assert_kernel_close, kernels, device, window, soft_cap, alibi, num_splits):
    case = paged_case([100, 0, 70], spread=4.0)
    slopes = 2.0 ** -torch.arange(1.0, 5.0, device=device) if alibi else None
    options = {"sliding_window": window, "soft_cap": soft_cap, "alibi_slopes": slopes}
    out = torch.full_like(case.q, float("nan"))
    case.decode(kernels, num_splits=num_splits, out=out, **options)
    assert_kernel_close(out, case.decode(reference, **options))


@pytest.mark.parametrize("dtype", [torch.float32, BRAIN])
def test_large_scores(paged_case, assert_kernel_close, kernels, dtype):
    """Scores in the hundreds: the softmax is one-hot and must not overflow."""
    case = paged_case([77, 30], dtype=dtype, spread=100.0)
    assert_kernel_close(case.decode(kernels, num_splits=2), case.decode(reference))


def test_more_splits_than_tiles(paged_case, assert_kernel_close, kernels):
    case = paged_case([5, 0, 130])
    assert_kernel_close(case.decode(kernels, num_splits=20), case.decode(reference))


def test_blocks_before_the_window_are_not_read(paged_case, kernels):
    case = paged_case([150, 20])
    before = case.decode(kernels, sliding_window=40)
    case.block_tables[0, :6] = 1 << 30
    assert torch.equal(case.decode(kernels, sliding_window=40), before)


def test_empty_batch(paged_case, kernels):
    assert paged_case([]).decode(kernels).shape == (0, 4, 64)


def test_split_heuristic():
    from rayllm_kernels.paged_decode_attention import MAX_SPLITS, choose_num_splits

    assert choose_num_splits(8, 100, 132) == 1
    assert choose_num_splits(8, 1024, 132) == 8
    assert choose_num_splits(8, 8192, 132) > 8
    assert choose_num_splits(8, 1 << 20, 132) <= MAX_SPLITS
    assert choose_num_splits(4096, 1 << 20, 132) == 1
    assert choose_num_splits(0, 0, 1) == 1


@pytest.mark.skipif(not ON_GPU, reason="CUDA graphs need a GPU")
def test_replays_in_a_cuda_graph(paged_case, assert_kernel_close, kernels):
    case = paged_case([3000, 100, 1], heads=(8, 2), dtype=torch.bfloat16)
    longest = case.seq_lens.clone()
    out = torch.full(case.q.shape, float("nan"), dtype=case.q.dtype, device=case.q.device)
    case.decode(kernels, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.decode(kernels, out=out)
    for shorter in (0, 1, 900):
        case.seq_lens.copy_((longest - shorter).clamp_min(0))
        out.fill_(float("nan"))
        graph.replay()
        assert_kernel_close(out, case.decode(reference))
