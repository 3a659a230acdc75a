"""Latents normed, keys and queries rotated, the cache written: the kernel against the reference, and its definition."""

from __future__ import annotations

import pytest
import torch
from support.closeness import check_close

from rayllm_kernels.norm.qk_norm_rope_cache import rotate
from rayllm_kernels.ops import latent_cache

EPS = 1e-6


@pytest.fixture
def case(randn, device):
    """(heads, rank, turned, dtype) -> (arguments of the op, the tensor that holds `out`)."""

    def build(heads, rank, turned, dtype=torch.float32, block_size=4):
        tokens = 5
        pool = torch.full((3, 2, 1, block_size, rank + turned), float("nan"), dtype=dtype, device=device)
        q = randn(tokens, heads, 7 + turned, dtype=dtype)
        kv = randn(tokens, 3 + rank + turned, dtype=dtype)
        room = torch.full((tokens, heads, rank + turned), float("nan"), dtype=dtype, device=device)
        angles = randn(20, turned // 2)
        arguments = {
            "q": q[:, :, 7:],
            "kv": kv[:, 3:],
            "norm_weight": randn(rank, dtype=dtype),
            "eps": EPS,
            "positions": torch.tensor([3, 0, 19, 7, 1], device=device),
            "cos_sin_cache": torch.cat([angles.cos(), angles.sin()], 1),
            "cache": latent_cache(pool[:, 1], rank),
            "slot_mapping": torch.tensor([5, -1, 0, 11, 2], device=device),
            "out": room[:, :, rank:],
        }
        return arguments, room

    return build


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("heads", "rank", "turned", "dtype"),
    [(4, 32, 8, torch.float32), (20, 24, 12, torch.float16), (1, 100, 2, torch.float32), (16, 512, 64, torch.bfloat16)],
)
def test_kernel_and_reference(case, kernels, reference, heads, rank, turned, dtype, interleaved):
    (ours, our_room), (theirs, their_room) = (case(heads, rank, turned, dtype) for _ in range(2))
    for name in ("q", "kv", "norm_weight", "cos_sin_cache"):
        theirs[name] = ours[name]
    assert kernels.latent_norm_rope_cache(**ours, interleaved=interleaved) is None
    reference.latent_norm_rope_cache(**theirs, interleaved=interleaved)
    assert our_room[:, :, :rank].isnan().all()  # what is not rotated belongs to somebody else
    check_close(ours["out"], theirs["out"])
    own, other = ours["cache"].k, theirs["cache"].k
    assert torch.equal(own.isnan(), other.isnan())
    assert int((~own.isnan()).sum()) == 4 * (rank + turned)
    check_close(own.nan_to_num(), other.nan_to_num())
    assert their_room.shape == our_room.shape


@pytest.mark.parametrize("interleaved", [False, True])
def test_definition(case, each, interleaved):
    arguments, _ = case(3, 16, 6)
    kv, cache = arguments["kv"].clone(), arguments["cache"]
    each.latent_norm_rope_cache(**arguments, interleaved=interleaved)
    assert torch.equal(arguments["kv"], kv)
    latent = kv[:, :16] * torch.rsqrt(kv[:, :16].pow(2).mean(-1, keepdim=True) + EPS) * arguments["norm_weight"]
    key = kv[:, None, 16:].clone()
    rotate(key, arguments["positions"], arguments["cos_sin_cache"], interleaved=interleaved)
    for token, slot in enumerate(arguments["slot_mapping"].tolist()):
        if slot >= 0:
            check_close(cache.k[slot // 4, 0, slot % 4], torch.cat([latent[token], key[token, 0]]))
            check_close(cache.v[slot // 4, 0, slot % 4], latent[token])


def test_no_tokens(case, each):
    arguments, _ = case(3, 16, 6)
    for name in ("q", "kv", "positions", "slot_mapping", "out"):
        arguments[name] = arguments[name][:0]
    each.latent_norm_rope_cache(**arguments)


def test_errors(case, each, randn):
    def fails(message, **changes):
        arguments, _ = case(3, 16, 6)
        with pytest.raises(ValueError, match=message):
            each.latent_norm_rope_cache(**arguments | changes)

    fails("^kv must be", kv=randn(5, 21))
    fails("^q must be", q=randn(5, 3, 5))
    fails("^out must have shape", out=randn(5, 3, 16))
    fails("^norm_weight must have shape", norm_weight=randn(15))
    fails("^cos_sin_cache must be", cos_sin_cache=randn(20, 4))
    fails("^cache must be one of latents", cache=latent_cache(randn(3, 1, 4, 22), 22))
    fails("^slot_mapping must have shape", slot_mapping=torch.zeros(4, dtype=torch.int64))
