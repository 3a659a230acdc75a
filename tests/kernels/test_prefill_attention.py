"""The Triton prefill attention against its reference."""

from __future__ import annotations

import pytest
import torch

from rayllm_kernels import reference

ON_GPU = torch.cuda.is_available()
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
def test_shapes(paged_case, assert_kernel_close, kernels, seq_lens, query_lens, heads, head_dim, block_size, dtype):
    case = paged_case(
        seq_lens, query_lens, heads=heads, head_dim=head_dim, block_size=block_size, dtype=dtype, spread=2.0
    )
    # The output is a strided slice, too.
    out = torch.full((sum(query_lens), heads[0] + 1, head_dim), float("nan"), dtype=dtype, device=case.q.device)[:, 1:]
    assert case.prefill(kernels, out=out) is out
    assert_kernel_close(out, case.prefill(reference))


@pytest.mark.parametrize("window", [None, 1, 24, 40, 500])
@pytest.mark.parametrize("soft_cap", [None, 3.0])
@pytest.mark.parametrize("alibi", [False, True])
def test_options(paged_case, assert_kernel_close, kernels, device, window, soft_cap, alibi):
    case = paged_case([120, 0, 70], [20, 0, 33], spread=4.0)
    slopes = 2.0 ** -torch.arange(1.0, 5.0, device=device) if alibi else None
    options = {"sliding_window": window, "soft_cap": soft_cap, "alibi_slopes": slopes}
    out = torch.full_like(case.q, float("nan"))
    case.prefill(kernels, out=out, **options)
    assert_kernel_close(out, case.prefill(reference, **options))


@pytest.mark.parametrize("dtype", [torch.float32, BRAIN])
def test_large_scores(paged_case, assert_kernel_close, kernels, dtype):
    case = paged_case([77, 30], [20, 30], dtype=dtype, spread=100.0)
    assert_kernel_close(case.prefill(kernels), case.prefill(reference))


def test_chunks_equal_the_whole(paged_case, assert_kernel_close, kernels):
    """A prompt in two chunks gives what it gives in one."""
    case = paged_case([75], [75])
    whole = case.prefill(kernels)
    head, tail = whole[:40], whole[40:]
    options = {"scale": case.scale}
    starts = case.query_start_loc
    arguments = (case.k_cache, case.v_cache, case.block_tables)
    first = kernels.paged_prefill_attention(
        case.q[:40], *arguments, case.seq_lens - 35, starts - starts // 75 * 35, 40, **options
    )
    second = kernels.paged_prefill_attention(
        case.q[40:], *arguments, case.seq_lens, starts - starts // 75 * 40, 35, **options
    )
    assert_kernel_close(first, head)
    assert_kernel_close(second, tail)


def test_a_chunk_of_one_is_a_decode(paged_case, assert_kernel_close, kernels):
    case = paged_case([75, 20])
    assert_kernel_close(case.prefill(kernels), case.decode(kernels))


def test_blocks_before_the_window_are_not_read(paged_case, kernels):
    case = paged_case([150, 20], [4, 3])
    before = case.prefill(kernels, sliding_window=40)
    case.block_tables[0, :6] = 1 << 30
    assert torch.equal(case.prefill(kernels, sliding_window=40), before)


def test_rows_outside_every_chunk_are_untouched(paged_case, kernels):
    case = paged_case([30], [10])
    q = torch.cat([case.q, case.q])
    out = torch.full_like(q, 7.0)
    kernels.paged_prefill_attention(
        q,
        case.k_cache,
        case.v_cache,
        case.block_tables,
        case.seq_lens,
        case.query_start_loc,
        12,
        scale=case.scale,
        out=out,
    )
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
    tables = torch.cat([case.block_tables, torch.zeros_like(case.block_tables[:1]).expand(20, -1)])
    lens = torch.cat([case.seq_lens, torch.zeros_like(case.seq_lens[:1]).expand(20)])
    out = torch.full_like(q, 7.0)
    kernels.paged_prefill_attention(
        q, case.k_cache, case.v_cache, tables, lens, starts, q.shape[0], scale=case.scale, out=out
    )
    assert torch.equal(out[before : before + rows], plain)
    assert (out[:before] == 7.0).all()
    assert (out[before + rows :] == 7.0).all()


def test_empty_batch(paged_case, kernels):
    assert paged_case([], []).prefill(kernels).shape == (0, 4, 64)


def test_layouts_that_the_hopper_kernel_takes(paged_case):
    from rayllm_kernels.paged_prefill_attention import hopper_takes

    def takes(heads=(8, 2), head_dim=128, block_size=16, dtype=torch.bfloat16):
        case = paged_case([40], [40], heads=heads, head_dim=head_dim, block_size=block_size, dtype=dtype)
        return hopper_takes(case.q, case.k_cache, case.v_cache)

    assert takes()
    assert takes(head_dim=64, block_size=24, dtype=torch.float16)
    assert not takes(dtype=torch.float32)
    assert not takes(head_dim=80)
    assert not takes(block_size=20)  # a copy would take 4 rows; the swizzle repeats every 8
    assert not takes(heads=(130, 1))
    slots_outside_heads = torch.empty(9, 16, 2, 128, dtype=torch.bfloat16).transpose(1, 2)
    assert not hopper_takes(torch.empty(3, 8, 128, dtype=torch.bfloat16), slots_outside_heads, slots_outside_heads)


COMPILE_HOPPER = """
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from rayllm_kernels.paged_prefill_hopper import SHARED, _hopper_kernel

constants = {"KV_HEADS": 2, "GROUP": 4, "BLOCK_SIZE": 16, "BOX": 16, "HEAD_DIM": 64}
desc = f"tensordesc<bf16[16, 64],{SHARED.value!r}>"
types = {"q_ptr": "*bf16", "out_ptr": "*bf16", "k_desc": desc, "v_desc": desc, "unit": "fp32"}
names = _hopper_kernel.arg_names
signature = {n: types.get(n, "*i32" if n.endswith("_ptr") else "i32") for n in names}
signature.update(dict.fromkeys(constants, "constexpr"))
source = GluonASTSource(_hopper_kernel, signature, {(names.index(n),): value for n, value in constants.items()})
print(triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"].count("wgmma.mma"))
"""


@pytest.mark.skipif(ON_GPU, reason="a GPU runs the kernel itself")
def test_hopper_kernel_compiles(run_compiler):
    """Gluon has no interpreter, and its API moves: at least, every version of Triton must build the kernel."""
    assert int(run_compiler(COMPILE_HOPPER)) > 0
