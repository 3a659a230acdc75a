"""What the deterministic mode asks of attention and of the row-wise kernels: the same bits in every batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from rayllm_kernels import ops, reference

ON_GPU = torch.cuda.is_available()
MODULE = ops if ON_GPU else reference  # the interpreter's matrix products are not the GPU's
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def attend(case, chunks, **options):
    """Attention of chunks (first, last) of the case's one sequence, each as a sequence of its own."""
    q = torch.cat([case.q[first:last] for first, last in chunks])
    starts = torch.tensor([0, *(last - first for first, last in chunks)]).cumsum(0).to(case.seq_lens)
    lens = torch.tensor([last for _first, last in chunks]).to(case.seq_lens)
    return MODULE.paged_prefill_attention(
        q,
        case.k_cache,
        case.v_cache,
        case.block_tables.expand(len(chunks), -1),
        lens,
        starts,
        max(last - first for first, last in chunks),
        scale=case.scale,
        deterministic=True,
        **options,
    )


def cuts(length, sizes):
    """Chunks of these sizes, over and over, that cover `length` tokens."""
    chunks, first = [], 0
    while first < length:
        last = min(length, first + sizes[len(chunks) % len(sizes)])
        chunks.append((first, last))
        first = last
    return chunks


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "head_dim", "options"),
    [
        ((8, 2), 64, {}),
        ((16, 8), 128, {}),
        ((7, 1), 64, {}),
        ((8, 4), 32, {}),
        ((4, 4), 80, {}),
        ((8, 2), 64, {"sliding_window": 70}),
        ((4, 2), 128, {"soft_cap": 5.0}),
        ((6, 6), 64, {"alibi_slopes": [2.0**-i for i in range(1, 7)]}),
    ],
)
def test_chunks_do_not_show(paged_case, device, heads, head_dim, options, dtype):
    options = {
        name: torch.tensor(each, device=device) if isinstance(each, list) else each for name, each in options.items()
    }
    length = 700 if ON_GPU else 150
    case = paged_case([length], [length], heads=heads, head_dim=head_dim, dtype=dtype, spread=2.0)
    whole = attend(case, [(0, length)], **options)
    for sizes in ([1], [16], [37], [128], [1, 5, 300]):
        chunks = cuts(length, sizes)
        assert torch.equal(attend(case, chunks, **options), whole), f"one batch of chunks of {sizes}"
        for first, last in chunks[:: max(1, len(chunks) // 8)]:
            alone = attend(case, [(first, last)], **options)
            assert torch.equal(alone, whole[first:last]), f"chunk {first} to {last} alone"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decodes_beside_long_chunks_and_padding(paged_case, dtype):
    """A decode's bits in a batch with a long chunk, and with padding rows as a captured step has them."""
    case = paged_case([200], [200], heads=(8, 2), head_dim=64, dtype=dtype)
    whole = attend(case, [(0, 200)])
    assert torch.equal(attend(case, [(199, 200), (0, 150), (60, 61)])[:1], whole[199:])
    q = torch.cat([case.q[199:], case.q[:3]])
    tables = case.block_tables.expand(4, -1).clone()
    tables[1:] = 0
    lens, starts = (torch.tensor(values).to(case.seq_lens) for values in ([200, 0, 0, 0], [0, 1, 2, 3, 4]))
    out = MODULE.paged_prefill_attention(
        q, case.k_cache, case.v_cache, tables, lens, starts, 1, scale=case.scale, deterministic=True
    )
    assert torch.equal(out[:1], whole[199:])


def check_rows(function, *tensors):
    """Rows of the function's results in batches of several sizes, at several places."""
    whole = function(*tensors)
    count = tensors[0].shape[0]
    for size in (1, 2, 3, 7, 16, 17, 64, 128, 129, 200, count):
        for first in sorted({0, 1, count - size}):
            if first + size <= count:
                part = function(*(tensor[first : first + size] for tensor in tensors))
                for ours, theirs in zip(part, whole, strict=True):
                    assert torch.equal(ours, theirs[first : first + size]), (first, size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [96, 256, 1024, 4096])
def test_norms(randn, dim, dtype):
    x, residual, weight = randn(300, dim, dtype=dtype), randn(300, dim, dtype=dtype), randn(dim, dtype=dtype)
    check_rows(lambda x: (MODULE.rms_norm(x, weight, 1e-6),), x)
    check_rows(lambda x, residual: MODULE.fused_add_rms_norm(x, residual, weight, 1e-6), x, residual)
    check_rows(lambda x: (F.layer_norm(x, (dim,), weight, weight, 1e-5),), x)


@pytest.mark.parametrize("act", ["silu", "relu", "gelu", "gelu_new"])
@pytest.mark.parametrize("dim", [20, 96, 3072])
def test_activations(randn, act, dim):
    from rayllm.layers.activation import activation, gated_activation

    x = randn(300, 2 * dim, dtype=torch.bfloat16 if ON_GPU else torch.float32)
    check_rows(lambda x: (gated_activation(act, deterministic=True)(x),), x)
    check_rows(lambda x: (activation(act, deterministic=True)(x),), x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(16, 8, 128), (8, 4, 32), (6, 2, 80)])
def test_heads(randn, device, heads, kv_heads, dim, norm, dtype):
    weight = randn(dim, dtype=dtype) if norm else None
    cos_sin, positions = randn(300, dim), torch.arange(300, device=device)

    def heads_of(qkv, positions):
        tokens = qkv.shape[0]
        k = randn(1, dtype=dtype).expand(tokens, kv_heads, 1, dim).clone()
        v = k.clone()
        slots = torch.arange(tokens, device=device)
        q = MODULE.qk_norm_rope_cache(
            qkv, positions, cos_sin, weight, weight, 1e-6, k, v, slots, heads, kv_heads, deterministic=True
        )
        return q, k, v

    check_rows(heads_of, randn(300, (heads + 2 * kv_heads) * dim, dtype=dtype), positions)
