"""Drawing tokens with noise, over whole vocabularies and over slices of one."""

from __future__ import annotations

import pytest
import torch

from rayllm_kernels.ops import DrawRows, tokens_of_keys
from rayllm_kernels.sampling.noise import RUN, SPAN, gumbel_noise


def draw_arguments(rows: int, vocab: int, dtype: torch.dtype, device: torch.device, randn) -> tuple:
    """(logits, how they are drawn)."""
    generator = torch.Generator().manual_seed(rows)
    seeds = torch.randint(0, 2**63 - 1, (rows,), generator=generator).to(device)
    positions = torch.randint(0, 4000, (rows,), generator=generator).to(device)
    temperature = torch.rand(rows, generator=generator).add_(0.2).to(device)
    noise_scale = torch.tensor([float(i % 3 != 0) for i in range(rows)], device=device)
    # A column slice: rows that are not contiguous.
    return 3 * randn(rows, vocab + 5, dtype=dtype)[:, :vocab], DrawRows(seeds, positions, temperature, noise_scale)


@pytest.mark.parametrize(("rows", "vocab"), [(1, 1), (1, 50), (7, 259), (3, 5000), (40, 1024)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_draws_equal_the_reference(kernels, reference, randn, device, rows, vocab, dtype):
    logits, draw = draw_arguments(rows, vocab, dtype, device, randn)
    expected = reference.gumbel_argmax(logits, draw)
    actual = kernels.gumbel_argmax(logits, draw)
    assert actual.dtype == torch.int64
    if torch.equal(actual, expected):
        return
    # Float ties only: the drawn score is the reference's best up to rounding.
    seeds, positions, temperature, noise_scale = draw
    scores = logits.float() / temperature[:, None] + noise_scale[:, None] * gumbel_noise(seeds, positions, vocab)
    best = scores.gather(1, expected[:, None])
    assert torch.allclose(scores.gather(1, actual[:, None]), best, atol=1e-4)
    assert (actual != expected).sum() <= rows // 20


def test_the_noise_is_the_reference_noise(kernels, device):
    """Equal logits leave only the noise to decide, over many (seed, position) pairs."""
    rows, vocab = (3000 if device.type == "cuda" else 100), 40
    seeds = torch.arange(rows, device=device) * (2**40 + 1)
    positions = torch.arange(rows, device=device) % 17
    ones = torch.ones(rows, device=device)
    logits = torch.zeros(rows, vocab, device=device)
    expected = gumbel_noise(seeds, positions, vocab).argmax(1)
    assert (kernels.gumbel_argmax(logits, DrawRows(seeds, positions, ones, ones)) == expected).float().mean() > 0.995


def test_equal_scores_go_to_the_lowest_token_and_minus_infinity_is_never_drawn(kernels, device):
    logits = torch.full((2, 5000), float("-inf"), device=device)
    logits[0, [4000, 123, 999]] = 2.0
    logits[1, 4711] = -50.0
    seeds = positions = torch.zeros(2, dtype=torch.int64, device=device)
    ones = torch.ones(2, device=device)
    assert kernels.gumbel_argmax(logits, DrawRows(seeds, positions, ones, 0 * ones)).tolist() == [123, 4711]
    assert kernels.gumbel_argmax(logits, DrawRows(seeds, positions, ones, ones))[1] == 4711


def test_scores_that_noise_does_not_change_go_to_the_lowest_token(each, device):
    """Logits so large that adding noise rounds to the same number; the kernel sees token SPAN before token RUN."""
    logits = torch.full((3, 5000), 2e9, device=device)
    logits[1, :RUN] = 0.0
    logits[2] = 0.0
    logits[2, [4711, SPAN, RUN]] = 2e9
    seeds, ones = torch.arange(3, device=device), torch.ones(3, device=device)
    assert each.gumbel_argmax(logits, DrawRows(seeds, seeds, ones, ones)).tolist() == [0, RUN, RUN]


@pytest.mark.parametrize(
    ("vocab", "borders"), [(259, [65, 130, 195]), (5000, [1250, 2500, 3750]), (3000, [1024]), (4, [1])]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_best_key_of_slices_is_the_draw_from_the_whole(each, randn, device, vocab, borders, dtype):
    logits, draw = draw_arguments(9, vocab, dtype, device, randn)
    whole = each.gumbel_argmax(logits, draw)
    parts = [(0, borders[0]), *zip(borders, [*borders[1:], vocab], strict=True)]
    keys = torch.stack([each.gumbel_keys(logits[:, a:b], draw, first_token=a) for a, b in parts])
    assert torch.equal(tokens_of_keys(keys.amax(0)), whole)


def test_keys_of_equal_scores_prefer_the_lower_token(each, device):
    logits = torch.full((3, 40), -2.5, device=device)
    logits[1] = 7.0
    logits[2] = float("-inf")
    zeros, ones = torch.zeros(3, dtype=torch.int64, device=device), torch.ones(3, device=device)
    draw = DrawRows(zeros, zeros, ones, 0 * ones)
    low, high = (each.gumbel_keys(logits, draw, first_token=t) for t in (2000, 5000))
    assert (low > high)[:2].all()
    assert tokens_of_keys(low).tolist()[:2] == [2000, 2000]
    assert low[1] > low[0] > low[2]


def test_bad_arguments_are_named(each, device, randn):
    logits, draw = draw_arguments(3, 10, torch.float32, device, randn)
    with pytest.raises(ValueError, match=r"^logits "):
        each.gumbel_argmax(logits.short(), draw)
    with pytest.raises(ValueError, match=r"^first_token "):
        each.gumbel_keys(logits, draw, first_token=-1)
    for name, values in draw._asdict().items():
        with pytest.raises(ValueError, match=f"^{name} "):
            each.gumbel_argmax(logits, draw._replace(**{name: values.short()}))
