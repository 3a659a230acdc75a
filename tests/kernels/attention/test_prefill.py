"""The Triton prefill attention against its reference."""

from __future__ import annotations

import pytest
import torch
from support.capabilities import each_where_it_can_run
from support.closeness import check_close

from rayllm_kernels import ops
from rayllm_kernels.ops import Contexts, KVCache

ON_GPU = torch.cuda.is_available()
# Of sinks far above all scores, and of products far above a cap.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")
# The interpreter's `tl.dot` multiplies bf16 bit patterns as integers: there, fp16 takes the place of bf16.
BRAIN = torch.bfloat16 if ON_GPU else torch.float16

# (context lengths, chunk lengths, (query heads, KV heads), head size, block size, dtype)
SHAPES = [
    ([37, 1, 0, 100], [37, 1, 0, 20], (4, 2), 64, 16, torch.float32),
    ([1], [1], (1, 1), 32, 1, torch.float32),
    ([50, 90], [1, 1], (4, 4), 32, 8, BRAIN),
    ([70, 3], [9, 3], (8, 1), 80, 16, BRAIN),
    ([65], [10], (7, 1), 96, 32, torch.float16),
    ([90], [13], (14, 2), 112, 64, torch.float32),
    ([140], [40], (4, 1), 128, 128, BRAIN),
    ([66], [20], (2, 1), 256, 16, torch.float32),
    ([66], [40], (2, 1), 256, 16, BRAIN),
    ([40], [9], (2, 1), 320, 16, torch.float32),
    ([66, 3], [30, 1], (8, 1), 512, 16, BRAIN),
    ([40], [3], (71, 1), 32, 16, torch.float32),
    ([150], [3], (130, 1), 32, 16, BRAIN),
    ([41], [30], (6, 3), 64, 5, torch.float16),
    ([300], [140], (2, 2), 32, 16, BRAIN),
]
if ON_GPU:
    SHAPES += [
        ([4096, 1, 1777, 0, 2048, 333], [4096, 1, 777, 0, 48, 300], (32, 8), 128, 16, torch.bfloat16),
        ([1024, 1, 777], [500, 1, 777], (32, 8), 128, 16, torch.float32),
        ([100 + 37 * i for i in range(32)], [1 + 5 * i for i in range(32)], (16, 8), 128, 16, torch.bfloat16),
        ([3000], [1000], (28, 4), 128, 32, torch.float16),
        ([5000], [2000], (8, 2), 80, 16, torch.bfloat16),
        ([3000, 1500], [1000, 1500], (16, 1), 256, 64, torch.bfloat16),
        ([3000, 500], [1000, 1], (32, 4), 512, 16, torch.bfloat16),
        ([300, 500], [300, 5], (16, 1), 512, 16, torch.float32),
        ([700] * 100, [1] * 100, (8, 8), 64, 16, torch.float16),
        ([3000], [3000], (64, 1), 64, 16, torch.bfloat16),
        # Chunks for the Hopper kernel: every width of a tensor copy, odd groups, contexts that end anywhere in a tile.
        ([300, 129, 128, 127, 1], [300, 129, 100, 127, 1], (8, 8), 128, 8, torch.bfloat16),
        ([777, 2500], [333, 70], (14, 2), 128, 24, torch.bfloat16),
        ([700, 1], [650, 1], (28, 4), 128, 256, torch.float16),
        ([1500] * 40, [1 + 37 * i for i in range(40)], (32, 8), 128, 16, torch.bfloat16),
        ([5000, 64], [200, 64], (71, 1), 64, 64, torch.bfloat16),
        ([400], [390], (100, 1), 128, 128, torch.float16),
        ([900], [800], (8, 2), 128, 5, torch.bfloat16),
    ]


@pytest.mark.parametrize(("seq_lens", "query_lens", "heads", "head_dim", "block_size", "dtype"), SHAPES)
def test_shapes(paged_case, kernels, reference, seq_lens, query_lens, heads, head_dim, block_size, dtype):
    case = paged_case(
        seq_lens, query_lens, heads=heads, head_dim=head_dim, block_size=block_size, dtype=dtype, spread=2.0
    )
    # The output is a strided slice, too.
    out = torch.full((sum(query_lens), heads[0] + 1, head_dim), float("nan"), dtype=dtype, device=case.q.device)[:, 1:]
    assert case.prefill(kernels, out) is out
    check_close(out, case.prefill(reference), terms=case.terms)


@pytest.mark.parametrize("window", [None, 1, 24, 40, 500])
@pytest.mark.parametrize("alibi", [False, True])
def test_options(paged_case, kernels, reference, alibi_slopes, window, alibi):
    case = paged_case([120, 0, 70], [20, 0, 33], spread=4.0)
    options = {"sliding_window": window, "alibi_slopes": alibi_slopes(4) if alibi else None}
    out = torch.full_like(case.q, float("nan"))
    case.prefill(kernels, out, **options)
    check_close(out, case.prefill(reference, **options), terms=case.terms)


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize(
    ("softcap", "has_sinks", "alibi"), [(3.0, False, True), (None, True, False), (1.5, True, True)]
)
def test_caps_and_sinks(paged_case, kernels, reference, alibi_slopes, sinks, softcap, has_sinks, alibi, window):
    case = paged_case([120, 0, 70, 5], [20, 0, 33, 1], spread=4.0)
    options = {
        "sliding_window": window,
        "alibi_slopes": alibi_slopes(4) if alibi else None,
        "softcap": softcap,
        "sinks": sinks(4) if has_sinks else None,
    }
    out = torch.full_like(case.q, float("nan"))
    case.prefill(kernels, out, **options)
    check_close(out, case.prefill(reference, **options), terms=case.terms)


def test_the_hopper_kernel_is_for_plain_scores(paged_case, kernels, monkeypatch, sinks):
    """On a Hopper GPU all else goes to the kernel that every GPU runs."""
    from rayllm_kernels.attention import prefill_kernel
    from rayllm_kernels.device import assumed, hardware

    class Hopper:
        calls = 0

        def prefill(self, *_):
            self.calls += 1

    case = paged_case([100], [100], heads=(8, 2), dtype=torch.float16)
    hopper = Hopper()
    monkeypatch.setattr(prefill_kernel, "_hopper", hopper)
    with assumed(case.q.device, hardware(case.q.device)._replace(capability=(9, 0))):
        case.prefill(kernels)
        assert hopper.calls == 1
        for options in ({"sinks": sinks(8, torch.float16)}, {"softcap": 5.0}, {"sliding_window": 200}):
            case.prefill(kernels, **options)
    assert hopper.calls == 1


@pytest.mark.parametrize("window", [None, 31, 32, 33])
def test_edges_of_tiles(paged_case, kernels, reference, window):
    """Tiles of fp32 are 32 keys: chunks, diagonals and windows that begin and end on either side of an edge."""
    lengths = [(past + new, new) for past in (29, 30, 31, 32, 33, 63) for new in (1, 2, 33)]
    case = paged_case(*zip(*lengths, strict=True), heads=(1, 1), head_dim=16, spread=2.0)
    out = torch.full_like(case.q, float("nan"))
    case.prefill(kernels, out, sliding_window=window)
    check_close(out, case.prefill(reference, sliding_window=window), terms=case.terms)


@pytest.mark.parametrize("dtype", [torch.float32, BRAIN])
def test_large_scores(paged_case, kernels, reference, dtype):
    case = paged_case([77, 30], [20, 30], dtype=dtype, spread=100.0)
    check_close(case.prefill(kernels), case.prefill(reference), terms=case.terms, exponent=500)


def test_chunks_equal_the_whole(paged_case, kernels):
    """A prompt in two chunks gives what it gives in one."""
    case = paged_case([75], [75])
    whole = case.prefill(kernels)
    head, tail = whole[:40], whole[40:]
    starts = case.query_start_loc
    tables, lens = case.contexts
    first = kernels.paged_prefill_attention(
        case.q[:40], case.cache, Contexts(tables, lens - 35), case.scoring(), starts - starts // 75 * 35, 40
    )
    second = kernels.paged_prefill_attention(
        case.q[40:], case.cache, case.contexts, case.scoring(), starts - starts // 75 * 40, 35
    )
    check_close(first, head, terms=case.terms)
    check_close(second, tail, terms=case.terms)


def test_a_chunk_of_one_is_a_decode(paged_case, kernels):
    case = paged_case([75, 20])
    check_close(case.prefill(kernels), case.decode(kernels), terms=case.terms)


def test_blocks_before_the_window_are_not_read(paged_case, kernels):
    case = paged_case([150, 20], [4, 3])
    before = case.prefill(kernels, sliding_window=40)
    case.contexts.block_tables[0, :6] = 1 << 30
    assert torch.equal(case.prefill(kernels, sliding_window=40), before)


def test_rows_outside_every_chunk_are_untouched(paged_case, kernels):
    case = paged_case([30], [10])
    q = torch.cat([case.q, case.q])
    out = torch.full_like(q, 7.0)
    kernels.paged_prefill_attention(q, case.cache, case.contexts, case.scoring(), case.query_start_loc, 12, out=out)
    assert torch.equal(out[:10], case.prefill(kernels))
    assert (out[10:] == 7.0).all()


@pytest.mark.parametrize("dtype", [torch.float32, BRAIN])
def test_padding_of_captured_steps(paged_case, kernels, dtype):
    """Chunks that begin some rows into q, and sequences without queries after them, change nothing else."""
    case = paged_case([300, 30, 170], [140, 1, 33], heads=(8, 2), head_dim=64, block_size=16, dtype=dtype)
    plain = case.prefill(kernels)
    before, after = 150, 40
    rows = case.q.shape[0]
    q = torch.cat([torch.full_like(case.q, 3.0)[:1].expand(before, -1, -1), case.q, case.q[:1].expand(after, -1, -1)])
    starts = torch.cat([case.query_start_loc + before, case.query_start_loc[-1:].expand(20) + before])
    tables, lens = (torch.cat([each, torch.zeros_like(each[:1]).repeat_interleave(20, 0)]) for each in case.contexts)
    out = torch.full_like(q, 7.0)
    kernels.paged_prefill_attention(q, case.cache, Contexts(tables, lens), case.scoring(), starts, q.shape[0], out=out)
    assert torch.equal(out[before : before + rows], plain)
    assert (out[:before] == 7.0).all()
    assert (out[before + rows :] == 7.0).all()


def test_empty_batch(paged_case, kernels):
    assert paged_case([], []).prefill(kernels).shape == (0, 4, 64)


def test_layouts_that_the_hopper_kernel_takes(paged_case):
    from rayllm_kernels.attention.prefill_kernel import hopper_takes

    def takes(heads=(8, 2), head_dim=128, block_size=16, dtype=torch.bfloat16):
        case = paged_case([40], [40], heads=heads, head_dim=head_dim, block_size=block_size, dtype=dtype)
        return hopper_takes(case.q, case.cache, torch.empty_like(case.q))

    assert takes()
    assert takes(head_dim=64, block_size=24, dtype=torch.float16)
    assert not takes(dtype=torch.float32)
    assert not takes(head_dim=80)
    assert not takes(block_size=20)  # a copy would take 4 rows; the swizzle repeats every 8
    assert not takes(heads=(130, 1))
    slots_outside_heads = torch.empty(9, 16, 2, 128, dtype=torch.bfloat16).transpose(1, 2)
    q = torch.empty(3, 8, 128, dtype=torch.bfloat16)
    assert not hopper_takes(q, KVCache(slots_outside_heads, slots_outside_heads), torch.empty_like(q))


def test_the_hopper_kernel_stores_pairs(paged_case):
    from rayllm_kernels.attention.prefill_kernel import hopper_takes

    case = paged_case([40], [40], heads=(8, 2), head_dim=128, dtype=torch.bfloat16)
    rows = torch.empty(40, 8 * 128 + 3, dtype=torch.bfloat16)
    for columns, row, takes in ((0, 1026, True), (2, 1026, True), (1, 1026, False), (0, 1027, False)):
        out = rows.as_strided((39, 8, 128), (row, 128, 1), columns)
        assert hopper_takes(case.q[:39], case.cache, out) == takes


COMPILE = """
from rayllm_kernels.attention.prefill_hopper import _hopper_kernel, prefill

pool = torch.zeros(4, 2, 2, 16, 64, dtype=torch.bfloat16)
q, lens = torch.zeros(9, 8, 64, dtype=torch.bfloat16), torch.ones(2, dtype=torch.int32)
contexts = Contexts(torch.zeros(2, 3, dtype=torch.int32), lens)
with ops.compile_only():
    prefill(q, KVCache(pool[:, 0], pool[:, 1]), contexts, 0.1, torch.zeros(3, dtype=torch.int32), torch.empty_like(q))
[kernel] = _hopper_kernel.device_caches[0][0].values()
print(kernel.asm["ptx"].count("wgmma.mma"))
"""


@pytest.mark.skipif(ON_GPU, reason="a GPU runs the kernel itself")
def test_hopper_kernel_compiles(run_compiler, tmp_path):
    """Gluon has no interpreter, and its API moves: at least, every version of Triton must build the kernel."""
    assert int(run_compiler(COMPILE, TRITON_CACHE_DIR=str(tmp_path))) > 0


def attend(case, chunks, **options):
    """Attention of chunks (first, last) of the case's one sequence, each as a sequence of its own."""
    tables, lens = case.contexts
    q = torch.cat([case.q[first:last] for first, last in chunks])
    starts = torch.tensor([0, *(last - first for first, last in chunks)]).cumsum(0).to(lens)
    contexts = Contexts(tables.expand(len(chunks), -1), torch.tensor([last for _first, last in chunks]).to(lens))
    longest = max(last - first for first, last in chunks)
    scoring = case.scoring(**options)
    # Not by the interpreter on a CPU, whose matrix products are not a GPU's.
    return ops.paged_prefill_attention(q, case.cache, contexts, scoring, starts, longest, deterministic=True)


def cuts(length, sizes):
    """Chunks of these sizes, over and over, that cover `length` tokens."""
    chunks, first = [], 0
    while first < length:
        last = min(length, first + sizes[len(chunks) % len(sizes)])
        chunks.append((first, last))
        first = last
    return chunks


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "head_dim", "options"),
    [
        ((8, 2), 64, {}),
        ((16, 8), 128, {}),
        ((7, 1), 64, {}),
        ((8, 4), 32, {}),
        ((4, 4), 80, {}),
        ((8, 2), 64, {"sliding_window": 70}),
        ((6, 6), 64, {"alibi": True}),
        ((8, 2), 64, {"softcap": 3.0, "sinks": True, "sliding_window": 40}),
    ],
)
def test_deterministic_chunks_do_not_show(paged_case, alibi_slopes, sinks, heads, head_dim, options, dtype):
    options = {"alibi_slopes": alibi_slopes(heads[0])} if "alibi" in options else options
    options = options | {"sinks": sinks(heads[0], dtype)} if "sinks" in options else options
    length = 700 if ON_GPU else 150
    case = paged_case([length], [length], heads=heads, head_dim=head_dim, dtype=dtype, spread=2.0)
    whole = attend(case, [(0, length)], **options)
    for sizes in ([1], [16], [37], [128], [1, 5, 300]):
        chunks = cuts(length, sizes)
        assert torch.equal(attend(case, chunks, **options), whole), f"one batch of chunks of {sizes}"
        for first, last in chunks[:: max(1, len(chunks) // 8)]:
            alone = attend(case, [(first, last)], **options)
            assert torch.equal(alone, whole[first:last]), f"chunk {first} to {last} alone"


@pytest.mark.parametrize("cache_dtype", each_where_it_can_run([torch.float8_e4m3fn, torch.float8_e5m2]))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deterministic_chunks_over_fp8(paged_case, cache_dtype, dtype):
    case = paged_case([150], [150], heads=(8, 2), dtype=dtype, cache_dtype=cache_dtype)
    whole = attend(case, [(0, 150)])
    for first, last in ((0, 1), (0, 37), (37, 150), (149, 150)):
        assert torch.equal(attend(case, [(first, last)]), whole[first:last])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deterministic_decodes_beside_long_chunks_and_padding(paged_case, dtype):
    """A decode's bits in a batch with a long chunk, and with padding rows as a captured step has them."""
    case = paged_case([200], [200], heads=(8, 2), head_dim=64, dtype=dtype)
    whole = attend(case, [(0, 200)])
    assert torch.equal(attend(case, [(199, 200), (0, 150), (60, 61)])[:1], whole[199:])
    q = torch.cat([case.q[199:], case.q[:3]])
    tables = case.contexts.block_tables.expand(4, -1).clone()
    tables[1:] = 0
    lens, starts = (torch.tensor(values).to(tables) for values in ([200, 0, 0, 0], [0, 1, 2, 3, 4]))
    out = ops.paged_prefill_attention(
        q, case.cache, Contexts(tables, lens), case.scoring(), starts, 1, deterministic=True
    )
    assert torch.equal(out[:1], whole[199:])
