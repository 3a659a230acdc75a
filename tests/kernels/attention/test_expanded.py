"""Attention with keys and values made of a cache of latents: kernel and reference against the plain formula."""

from __future__ import annotations

import pytest
import torch
from support.closeness import check_close

from rayllm_kernels.attention.expanded import PIECE_KEYS
from rayllm_kernels.attention.reference import attend, gather
from rayllm_kernels.ops import KeyPiece, Scoring, latent_rows

ON_GPU = torch.cuda.is_available()
# The interpreter's `tl.dot` multiplies bf16 bit patterns as integers: there, fp16 takes the place of bf16.
BRAIN = torch.bfloat16 if ON_GPU else torch.float16

# (context lengths, chunk lengths, heads, sizes of latent, rotated, unrotated and value, keys of a piece, dtype)
SHAPES = [
    ([37, 150, 5], [37, 20, 1], 2, (32, 8, 12, 20), 128, torch.float32),
    ([300, 40], [60, 40], 1, (48, 16, 32, 16), 256, torch.float32),
    ([140], [136], 3, (64, 64, 128, 128), 1000, BRAIN),
]
if ON_GPU:
    SHAPES += [
        ([5000, 700, 1, 3000], [700, 700, 1, 130], 16, (512, 64, 128, 128), 2048, torch.bfloat16),
        ([2000, 300], [1000, 300], 20, (512, 64, 192, 256), 1024, torch.bfloat16),
        ([900], [700], 8, (256, 64, 64, 128), 512, torch.float16),
        ([600], [300], 4, (512, 64, 128, 128), 128, torch.float32),
    ]


def pieces_of(case, room: int) -> list[KeyPiece]:
    """Each sequence's keys in parts of at most `room`, two parts of two sequences together where they fit."""
    starts, lens = case.query_start_loc, case.contexts.seq_lens
    parts = [
        (sequence, first, min(first + room, length))
        for sequence, length in enumerate(lens.tolist())
        for first in range(0, length, room // PIECE_KEYS * PIECE_KEYS)
    ]
    groups = []
    for part in parts:
        if groups and groups[-1][-1][0] != part[0] and sum(e - f for _, f, e in [*groups[-1], part]) <= room:
            groups[-1].append(part)
        else:
            groups.append([part])
    pieces = []
    for group in groups:
        own = slice(group[0][0], group[-1][0] + 1)
        counts = torch.tensor([end - first for _, first, end in group], device=lens.device)
        rows = torch.repeat_interleave(counts)
        positions = torch.cat([torch.arange(first, end, device=lens.device) for _, first, end in group])
        bounds = [[first, end, int(counts[:i].sum())] for i, (_, first, end) in enumerate(group)]
        pieces.append(
            KeyPiece(
                latent_rows(case.cache, case.contexts.block_tables[own], rows, positions),
                torch.tensor(bounds, dtype=torch.int32, device=lens.device),
                lens[own],
                starts[group[0][0] : group[-1][0] + 2].clone(),
                int(starts.diff()[own].max()),
            )
        )
    return pieces


def make(paged_case, randn, seq_lens, query_lens, heads, sizes, dtype):
    """(case of a cache of latents, queries of heads of their own, weight)."""
    latent, rest, key_dim, value_dim = sizes
    case = paged_case(seq_lens, query_lens, heads=(1, 1), head_dim=latent + rest, value_dim=latent, dtype=dtype)
    q = randn(sum(query_lens), heads + 1, key_dim + rest, dtype=dtype)[:, 1:] * 2.0
    weight = (randn(heads, key_dim + value_dim, latent) * latent**-0.5).to(dtype)
    return case, q, weight


def formula(case, q, weight, scale):
    """Sequence by sequence, with all keys and values at once."""
    latent, rest = case.cache.v.shape[3], case.cache.k.shape[3] - case.cache.v.shape[3]
    key_dim, out, starts = q.shape[2] - rest, [], case.query_start_loc.tolist()
    for sequence, length in enumerate(case.contexts.seq_lens.tolist()):
        k_pos = torch.arange(length, device=q.device)
        found = gather(case.cache, case.contexts.block_tables[sequence : sequence + 1], k_pos[None])[0][0, 0]
        made = torch.einsum("kl,hdl->hkd", found[:, :latent].float(), weight.float()).to(q.dtype)
        turned = found[None, :, latent:].expand(len(made), -1, -1)
        k, v = torch.cat([made[..., :key_dim], turned], dim=2), made[..., key_dim:]
        own = q[starts[sequence] : starts[sequence + 1]]
        distance = k_pos - (length - len(own) + torch.arange(len(own), device=q.device))[:, None]
        out.append(attend(own[None], k[None], v[None], distance[None], Scoring(scale))[0])
    return torch.cat(out).to(q.dtype)


@pytest.mark.parametrize(("seq_lens", "query_lens", "heads", "sizes", "room", "dtype"), SHAPES)
def test_shapes(paged_case, randn, each, seq_lens, query_lens, heads, sizes, room, dtype):
    case, q, weight = make(paged_case, randn, seq_lens, query_lens, heads, sizes, dtype)
    wide = torch.full((len(q), heads, sizes[3] + 4), float("nan"), dtype=dtype, device=q.device)
    out, scale = wide[..., : sizes[3]], q.shape[2] ** -0.5
    each.expanded_prefill_attention(q, case.cache, weight, scale, pieces_of(case, room), room, out)
    check_close(out, formula(case, q, weight, scale), terms=case.terms)
    assert wide[..., sizes[3] :].isnan().all()


def test_pieces_do_not_change_a_bit(paged_case, randn, kernels):
    case, q, weight = make(paged_case, randn, [300, 30], [20, 30], 1, (32, 8, 16, 16), torch.float32)
    results = []
    for room in (128, 256, 1000):
        results.append(torch.empty(len(q), 1, 16, device=q.device))
        kernels.expanded_prefill_attention(q, case.cache, weight, 0.2, pieces_of(case, room), room, results[-1])
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_errors(paged_case, randn, each):
    case, q, weight = make(paged_case, randn, [20], [20], 2, (16, 8, 12, 20), torch.float32)
    other, pieces, out = paged_case([20], heads=(2, 1), head_dim=24), pieces_of(case, 128), q.new_empty(20, 2, 20)
    good = {"q": q, "cache": case.cache, "weight": weight, "scale": 1.0, "pieces": pieces, "room": 128, "out": out}
    for changed, message in (
        ({"cache": other.cache}, r"^cache must be one of latents"),
        ({"q": q[..., 1:]}, r"^weight must be|^out must have shape"),
        ({"weight": weight[:1]}, r"^weight must be \[2, more than 12, 16\]"),
        ({"weight": weight.half()}, r"^weight must have the dtype"),
        ({"scale": 0.0}, r"^scale must be positive"),
        ({"room": 19}, r"^room must be at least 20"),
        ({"out": out[..., 1:]}, r"^out must have shape \(20, 2, 20\)"),
        ({"pieces": [pieces[0]._replace(bounds=pieces[0].bounds[:, :2])]}, r"^bounds must be \[1, 3\]"),
    ):
        with pytest.raises(ValueError, match=message):
            each.expanded_prefill_attention(**good | changed)
