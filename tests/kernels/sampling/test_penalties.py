"""Penalties: the kernel against its reference, to the bit."""

from __future__ import annotations

import pytest
import torch

from rayllm_kernels.ops import PenaltyRows

ON_GPU = torch.cuda.is_available()
INF = float("inf")
PENALTIES = [
    (1.0, 0.0, 0.0),
    (1.3, 0.5, 0.25),
    (0.5, -2.0, -1.5),
    (100.0, 2.0, 2.0),
    (1e-30, 0.0, 0.0),
    (2.0, 0.0, 0.1),
]


@pytest.mark.parametrize("vocab", [40, 5000, *((151_936, 128_256, 50_257) if ON_GPU else ())])
@pytest.mark.parametrize("length", [1, 100, 3000])
def test_penalties_equal_the_reference(kernels, reference, device, vocab, length):
    generator = torch.Generator().manual_seed(vocab + length)
    logits = 3 * torch.randn(9, vocab, generator=generator)
    logits.masked_fill_(torch.rand(logits.shape, generator=generator) < 0.1, -INF)
    table = torch.randint(0, min(vocab, 2000) + 2, (11, length + 5), generator=generator, dtype=torch.int32)
    table[0, 0], table[3, 0] = 2**31 - 1, -1
    num_tokens = torch.randint(0, length + 1, (6,), generator=generator)
    num_tokens[0] = length
    num_prompt = (num_tokens * torch.rand(6, generator=generator)).long()
    repetition, presence, frequency = torch.tensor(PENALTIES).T.contiguous()
    rows, table_rows = torch.tensor([0, 2, 3, 4, 7, 8]), torch.tensor([3, 0, 10, 9, 1, 2])
    columns = rows, table_rows, num_prompt, num_tokens, repetition, presence, frequency
    penalties = PenaltyRows(*(column.to(device) for column in columns))
    expected, actual = logits.to(device, copy=True), logits.to(device, copy=True)
    reference.penalise(expected, table.to(device), penalties)
    kernels.penalise(actual, table.to(device), penalties)
    assert torch.equal(actual, expected)
    assert torch.equal(actual[[1, 5, 6]].cpu(), logits[[1, 5, 6]])
    assert (actual < INF).all()


@pytest.fixture
def small(device):
    """(logits, token table, penalties of both rows)."""
    rows, ones = torch.arange(2, device=device), torch.ones(2, device=device)
    table = torch.zeros(2, 4, dtype=torch.int32, device=device)
    return torch.zeros(2, 50, device=device), table, PenaltyRows(rows, rows, rows, rows, ones, ones, ones)


def test_no_rows(each, small):
    logits, table, penalties = small
    before = logits.clone()
    each.penalise(logits, table, PenaltyRows(*(column[:0] for column in penalties)))
    assert torch.equal(logits, before)


def test_bad_arguments_are_named(each, small):
    logits, table, penalties = small
    with pytest.raises(ValueError, match=r"^logits "):
        each.penalise(logits.half(), table, penalties)
    with pytest.raises(ValueError, match=r"^token_table "):
        each.penalise(logits, table.long(), penalties)
    for name, column in penalties._asdict().items():
        with pytest.raises(ValueError, match=f"^{name} "):
            each.penalise(logits, table, penalties._replace(**{name: column.short()}))
