"""Adapters of a batch: Triton against the reference, and that against float64."""

from __future__ import annotations

import pytest
import torch
from support.closeness import check_close

from rayllm_kernels.ops import AdapterSlots

DTYPES = [torch.float32, torch.bfloat16 if torch.cuda.is_available() else torch.float16]
ON_GPU = torch.cuda.is_available()


def exact(x: torch.Tensor, y: torch.Tensor, slots: torch.Tensor, weights: AdapterSlots) -> torch.Tensor:
    """y + B A x of each token, in float64; what is shrunk is rounded."""
    total = y.double().clone()
    for token, slot in enumerate(slots.tolist()):
        first = 0
        for number, width in enumerate(weights.rows):
            if slot >= 0 and (rank := int(weights.ranks[slot, number])):
                shrunk = (x[token].double() @ weights.a[slot, number, :rank].double().t()).to(x.dtype).double()
                b = weights.b[first : first + width, slot, :rank].double()
                total[token, first : first + width] += b @ shrunk
            first += width
    return total.to(y.dtype)


CASES = [  # inputs, rows of each projection, ranks of each slot, largest rank, slots of the tokens
    (96, (40, 24, 24), [[4, 4, 0], [16, 7, 16], [0, 0, 0]], 16, [0, 1, -1, 1, 2, 0]),
    (1300, (300,), [[64], [5]], 64, [-1] * 3 + [1] * 20 + [0]),
    (70, (130, 20), [[33, 8]], 40, [0]),
    (64, (16,), [[8], [8]], 8, [-1, -1]),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{len(case[1])}-{case[3]}")
def test_each_token_gets_its_adapter(randn, device, kernels, reference, make_slots, case, dtype):
    inputs, rows, ranks, most, of_tokens = case
    weights = make_slots(inputs, rows, ranks, most, dtype)
    slots = torch.tensor(of_tokens, dtype=torch.int32, device=device)
    x, y = randn(len(of_tokens), inputs + 8, dtype=dtype)[:, :inputs], randn(len(of_tokens), sum(rows), dtype=dtype)
    expected = exact(x, y, slots, weights)
    for implementation in (reference, kernels):
        out = y.clone()
        implementation.add_adapters(x, out, slots, weights)
        check_close(out, expected, terms=inputs + most, slack=4)
        assert torch.equal(out[slots < 0], y[slots < 0]), "a token without an adapter is left alone"


def test_tokens_do_not_know_of_others(randn, device, each, make_slots, places):
    """As the deterministic mode asks."""
    weights = make_slots(600, (48, 32), [[16, 4], [8, 24], [3, 3]], 24, torch.bfloat16 if ON_GPU else torch.float32)
    x, y = randn(40, 600, dtype=weights.a.dtype), randn(40, 80, dtype=weights.a.dtype)
    slots = torch.tensor([-1, 0, 1, 2, 1] * 8, dtype=torch.int32, device=device)
    whole = y.clone()
    each.add_adapters(x, whole, slots, weights, deterministic=True)
    others = (slice(3, 4), slice(11, 40), slice(None, None, 3)) if places == 1 else (slice(16, 17), slice(16, 40))
    for tokens in (slice(0, 17), *others):
        part = y[tokens].clone()
        each.add_adapters(x[tokens], part, slots[tokens].contiguous(), weights, deterministic=True)
        assert torch.equal(part, whole[tokens])


def test_no_tokens(randn, device, each, make_slots):
    weights = make_slots(64, (16,), [[8]], 8, torch.float32)
    each.add_adapters(randn(0, 64), randn(0, 16), torch.zeros(0, dtype=torch.int32, device=device), weights)


def test_bad_arguments_are_named(randn, device, each, make_slots):
    weights = make_slots(64, (16, 8), [[8, 8]], 8, torch.float32)
    x, y, slots = randn(3, 64), randn(3, 24), torch.zeros(3, dtype=torch.int32, device=device)
    for arguments, name in (
        ((x[:2], y, slots, weights), "x"),
        ((x, y.bfloat16(), slots, weights), "y"),
        ((x, y, slots.long(), weights), "slots"),
        ((x[:, :32].contiguous(), y, slots, weights), "a"),
        ((x, y[:, :20], slots, weights), "b"),
        ((x, y, slots, weights._replace(ranks=weights.ranks.long())), "ranks"),
    ):
        with pytest.raises(ValueError, match=f"^{name} "):
            each.add_adapters(*arguments)
