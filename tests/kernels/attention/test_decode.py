"""The Triton decode attention against its reference."""

from __future__ import annotations

import pytest
import torch
from support.closeness import check_close

ON_GPU = torch.cuda.is_available()
# Of sinks far above all scores, and of products far above a cap.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")
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
    ([40], (2, 1), 320, 16, torch.float32),
    ([66, 3], (8, 1), 512, 16, BRAIN),
    ([20], (37, 1), 512, 16, BRAIN),
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
        ([3000, 500], (32, 4), 512, 16, torch.bfloat16),
        ([300, 500], (64, 1), 512, 16, torch.float32),
        ([700] * 300, (8, 8), 64, 16, torch.float16),
    ]


@pytest.mark.parametrize("num_ranges", [1, 5, None])
@pytest.mark.parametrize(("seq_lens", "heads", "head_dim", "block_size", "dtype"), SHAPES)
def test_shapes(paged_case, kernels, reference, seq_lens, heads, head_dim, block_size, dtype, num_ranges):
    case = paged_case(seq_lens, heads=heads, head_dim=head_dim, block_size=block_size, dtype=dtype, spread=2.0)
    # The output is a strided slice, too.
    out = torch.full((len(seq_lens), heads[0] + 1, head_dim), float("nan"), dtype=dtype, device=case.q.device)[:, 1:]
    assert case.decode_in_ranges(kernels, num_ranges, out) is out
    check_close(out, case.decode(reference), terms=case.terms)
    for row, length in enumerate(seq_lens):
        assert length > 0 or not out[row].any()


@pytest.mark.parametrize("num_ranges", [1, 4])
@pytest.mark.parametrize("window", [None, 1, 40, 64, 500])
@pytest.mark.parametrize("alibi", [False, True])
def test_options(paged_case, kernels, reference, alibi_slopes, window, alibi, num_ranges):
    case = paged_case([100, 0, 70], spread=4.0)
    options = {"sliding_window": window, "alibi_slopes": alibi_slopes(4) if alibi else None}
    out = torch.full_like(case.q, float("nan"))
    case.decode_in_ranges(kernels, num_ranges, out, **options)
    check_close(out, case.decode(reference, **options), terms=case.terms)


@pytest.mark.parametrize("num_ranges", [1, 5])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(
    ("softcap", "has_sinks", "alibi"), [(3.0, False, True), (None, True, False), (1.5, True, True)]
)
def test_caps_and_sinks(
    paged_case, kernels, reference, alibi_slopes, sinks, softcap, has_sinks, alibi, window, num_ranges
):
    """In whole sequences, and in those that are merged of up to five parts."""
    case = paged_case([100, 0, 300, 1], spread=4.0)
    options = {
        "sliding_window": window,
        "alibi_slopes": alibi_slopes(4) if alibi else None,
        "softcap": softcap,
        "sinks": sinks(4) if has_sinks else None,
    }
    out = torch.full_like(case.q, float("nan"))
    case.decode_in_ranges(kernels, num_ranges, out, **options)
    check_close(out, case.decode(reference, **options), terms=case.terms)


@pytest.mark.parametrize(("heads", "head_dim", "dtype"), [((71, 1), 64, BRAIN), ((14, 2), 80, torch.float16)])
def test_sinks_of_many_heads(paged_case, kernels, reference, sinks, heads, head_dim, dtype):
    case = paged_case([70, 31, 0, 200], heads=heads, head_dim=head_dim, dtype=dtype, spread=2.0)
    options = {"sinks": sinks(heads[0], dtype), "softcap": 5.0}
    check_close(case.decode_in_ranges(kernels, 4, **options), case.decode(reference, **options), terms=case.terms)


def test_layers_of_one_window_share_a_schedule(paged_case, kernels, reference, sinks):
    """It says nothing of soft caps and sinks: layers with, without and with others are right by the same one."""
    case = paged_case([100, 0, 300, 1])
    schedule = case.schedule(kernels, num_ranges=3)
    for options in ({"sinks": sinks(4)}, {}, {"softcap": 2.0}, {"sinks": sinks(4), "softcap": 0.5}):
        check_close(case.decode(kernels, schedule, **options), case.decode(reference, **options), terms=case.terms)


@pytest.mark.parametrize("dtype", [torch.float32, BRAIN])
def test_large_scores(paged_case, kernels, reference, dtype):
    """Scores in the hundreds: the softmax is one-hot and must not overflow."""
    case = paged_case([77, 30], dtype=dtype, spread=100.0)
    check_close(case.decode_in_ranges(kernels, 3), case.decode(reference), terms=case.terms, exponent=500)


# Tiles of fp32 are 32 keys: (context lengths, ranges that borders cut in a way of their own)
BORDERS = [
    ([5, 0, 130], 20),  # more ranges than tiles
    ([32, 64, 96], 3),  # every border between two sequences
    ([32, 64, 96], 6),  # a tile a range
    ([33, 31, 65, 1], 2),
    ([1] * 9, 4),
    ([0, 0, 40, 0, 0, 0, 70, 0], 3),  # padding rows before, between and behind
    ([0, 0, 0], 2),
    ([700, 1, 2, 33, 3, 1], 7),  # one sequence over many ranges
    ([1, 2, 33, 3, 700], 5),
    ([700], 23),  # as many parts as tiles
]


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(("seq_lens", "num_ranges"), BORDERS)
def test_borders_of_ranges(paged_case, kernels, reference, seq_lens, num_ranges, window):
    case = paged_case(seq_lens, heads=(4, 2), head_dim=32)
    schedule = case.schedule(kernels, num_ranges=num_ranges, sliding_window=window)
    out = torch.full_like(case.q, float("nan"))
    case.decode(kernels, schedule, out, sliding_window=window)
    check_close(out, case.decode(reference, sliding_window=window), terms=case.terms)
    # The schedule serves the next layer, too: other queries, the same lengths.
    case.q.mul_(2.0)
    again = case.decode(kernels, schedule, sliding_window=window)
    check_close(again, case.decode(reference, sliding_window=window), terms=case.terms)


@pytest.mark.parametrize("seed", range(6))
def test_ragged_batches(paged_case, kernels, reference, seed):
    generator = torch.Generator().manual_seed(seed)
    batch = int(torch.randint(1, 12, (1,), generator=generator))
    lengths = torch.randint(0, 150, (batch,), generator=generator)
    lengths[torch.rand(batch, generator=generator) < 0.2] = 0
    num_ranges = int(torch.randint(1, 15, (1,), generator=generator))
    case = paged_case(lengths.tolist(), heads=(2, 1), head_dim=16, block_size=8)
    check_close(case.decode_in_ranges(kernels, num_ranges), case.decode(reference), terms=case.terms)


@pytest.mark.skipif(not ON_GPU, reason="the interpreter runs programs one by one, in order")
def test_results_do_not_depend_on_arrival_order(paged_case, kernels):
    case = paged_case([1 + 211 * i % 1700 for i in range(40)], heads=(16, 8), head_dim=128, dtype=torch.bfloat16)
    first = case.decode(kernels)
    schedule = case.schedule(kernels)
    for _ in range(50):
        assert torch.equal(case.decode(kernels, schedule), first)


def test_blocks_before_the_window_are_not_read(paged_case, kernels):
    case = paged_case([150, 20])
    before = case.decode(kernels, sliding_window=40)
    case.contexts.block_tables[0, :6] = 1 << 30
    assert torch.equal(case.decode(kernels, sliding_window=40), before)


def test_empty_batch(paged_case, kernels):
    assert paged_case([]).decode(kernels).shape == (0, 4, 64)


@pytest.mark.skipif(not ON_GPU, reason="CUDA graphs need a GPU")
def test_replays_in_a_cuda_graph(paged_case, kernels, reference):
    case = paged_case([3000, 100, 1], heads=(8, 2), dtype=torch.bfloat16)
    longest = case.contexts.seq_lens.clone()
    out = torch.full(case.q.shape, float("nan"), dtype=case.q.dtype, device=case.q.device)
    case.decode(kernels, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        schedule = case.schedule(kernels)
        for _layer in range(2):
            case.decode(kernels, schedule, out)
    for shorter in (2990, 900, 1, 0):
        case.contexts.seq_lens.copy_((longest - shorter).clamp_min(0))
        out.fill_(float("nan"))
        graph.replay()
        check_close(out, case.decode(reference), terms=case.terms)


def test_every_schedule_is_there_in_time(paged_case, kernels, reference):
    """Attention reads it before it waits for the kernel before it: never what the memory held until then."""
    cases = [
        paged_case(lens, heads=(8, 2), head_dim=64, dtype=BRAIN)
        for lens in ([700, 3, 0, 90], [5, 64, 300, 1], [0, 0, 0, 2])
    ]
    expected = [case.decode(reference) for case in cases]
    for turn in range(300 if ON_GPU else 3):
        case = turn % len(cases)
        check_close(cases[case].decode(kernels), expected[case], terms=cases[case].terms)
