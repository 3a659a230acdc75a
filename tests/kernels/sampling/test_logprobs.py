"""Log-probabilities: the kernel against its reference, on rows made to mislead it."""

from __future__ import annotations

import pytest
import torch

ON_GPU = torch.cuda.is_available()
INF = float("inf")
VOCABS = [151_936, 128_256, 50_257] if ON_GPU else [5_000]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KINDS = ["flat", "peaked", "ties", "equal", "ascending", "mostly banned", "one group", "huge"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_logprobs_equal_the_reference(kernels, reference, rows_of, device, kind, num_top):
    for vocab in VOCABS:
        for dtype in DTYPES:
            if kind == "huge" and dtype == torch.float16:
                continue  # not in its range
            logits = rows_of(kind, vocab).to(device, dtype)
            rows = torch.tensor([0, 2, 3, 5], device=device)
            token_ids = torch.tensor([0, vocab - 1, vocab // 2, int(logits[5].argmax())], device=device)
            expected = reference.gather_logprobs(logits, rows, token_ids, num_top)
            actual = kernels.gather_logprobs(logits, rows, token_ids, num_top)
            assert torch.equal(actual[1], expected[1])  # ranks
            assert torch.equal(actual[2], expected[2])  # top ids
            for found, wanted in ((actual[0], expected[0]), (actual[3], expected[3])):
                assert found.dtype == wanted.dtype and found.shape == wanted.shape
                assert torch.allclose(found, wanted, rtol=1e-5, atol=2e-5)


def test_logprobs_of_few_tokens_rank_all_of_them(kernels, device):
    logits = torch.tensor([[-0.0, 2.0, 0.0, 2.0, -5.0, -INF, -1.0, 2.0, -5.0]], device=device)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    _, ranks, top_ids, top_logprobs = kernels.gather_logprobs(logits, zero, zero + 3, 9)
    assert top_ids.tolist() == [[1, 3, 7, 0, 2, 6, 4, 8, 5]]
    assert ranks.tolist() == [1]
    assert top_logprobs[0, -1] == -INF


def test_no_rows(each, device):
    nobody = torch.zeros(0, dtype=torch.int64, device=device)
    results = each.gather_logprobs(torch.zeros(2, 50, device=device), nobody, nobody, 3)
    assert [tuple(tensor.shape) for tensor in results] == [(0,), (0,), (0, 3), (0, 3)]


def test_bad_arguments_are_named(each, device):
    logits, rows = torch.zeros(2, 50, device=device), torch.arange(2, device=device)
    for name, arguments in (
        ("logits", (logits.short(), rows, rows, 3)),
        ("rows", (logits, rows.short(), rows, 3)),
        ("token_ids", (logits, rows, rows.short(), 3)),
        ("num_top", (logits, rows, rows, 51)),
    ):
        with pytest.raises(ValueError, match=f"^{name} "):
            each.gather_logprobs(*arguments)
