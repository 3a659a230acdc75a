"""Truncation of draws: the kernel against its reference, on rows made to mislead it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayllm_kernels.ops import CutRows, DrawRows
from rayllm_kernels.sampling.noise import gumbel_noise
from rayllm_kernels.sampling.truncation import cutoff, weights

ON_GPU = torch.cuda.is_available()
INF = float("inf")
VOCABS = [151_936, 128_256, 50_257] if ON_GPU else [5_000]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KINDS = ["flat", "peaked", "ties", "equal", "ascending", "mostly banned", "one token", "one group", "huge"]
# (top_k, top_p, min_p); a top_k beyond what is listed on chip too
CUTS = [
    (0, 1.0, 0.0),
    (1, 1.0, 0.0),
    (50, 1.0, 0.0),
    (1500, 1.0, 0.0),
    (0, 0.9, 0.0),
    (0, 0.1, 0.0),
    (0, 1e-30, 0.0),
    (0, 0.9999999, 0.0),
    (0, 1.0, 1.0),
    (0, 1.0, 0.02),
    (50, 0.9, 0.0),
    (7, 0.3, 0.05),
    (2000, 0.5, 1e-4),
]


class Draw:
    """Rows of logits with everything that a draw takes; row i has cut i % len(cuts)."""

    def __init__(self, logits: torch.Tensor, cuts: list, temperature: float, seed: int = 0):
        count, device = logits.shape[0], logits.device
        chosen = [cuts[i % len(cuts)] for i in range(count)]
        self.logits = logits
        self.draw = DrawRows(
            seeds=(torch.arange(count) * 7919 + seed).to(device),
            positions=(torch.arange(count) % 100 + 3).to(device),
            temperature=torch.full((count,), temperature, device=device),
            noise_scale=torch.ones(count, device=device),
        )
        self.cut = CutRows(
            rows=torch.arange(count, device=device),
            top_k=torch.tensor([min(k, logits.shape[1] - 1) for k, _, _ in chosen], device=device),
            top_p=torch.tensor([p for _, p, _ in chosen], device=device),
            log_min_p=torch.tensor([math.log(m) if m else -INF for _, _, m in chosen], device=device),
        )

    def run(self, module) -> torch.Tensor:
        tokens = module.gumbel_argmax(self.logits, self.draw)
        module.truncate_draws(tokens, self.logits, self.draw, self.cut)
        return tokens

    def check(self, tokens: torch.Tensor) -> None:
        """Each token is kept, exactly, and its score is the best of the kept up to what logarithms round."""
        wide = self.logits.float()
        limits = cutoff(wide, self.draw.temperature, *self.cut[1:])
        taken = wide.gather(1, tokens[:, None])[:, 0]
        assert (taken >= limits).all()
        assert (taken > -INF).all()
        scaled = wide * (1.0 / self.draw.temperature)[:, None]
        scores = scaled + gumbel_noise(self.draw.seeds, self.draw.positions, wide.shape[1])
        scores.masked_fill_(wide < limits[:, None], -INF)
        best = scores.amax(dim=1)
        reached = scores.gather(1, tokens[:, None])[:, 0]
        assert (reached >= best - 1e-5 - 1e-6 * best.abs()).all()


@pytest.mark.parametrize("kind", KINDS)
# The interpreter takes seconds a case; other dtypes and temperatures are among what the next test draws.
@pytest.mark.parametrize("dtype", DTYPES if ON_GPU else [torch.bfloat16])
def test_draws_from_adversarial_rows_equal_the_reference(kernels, reference, rows_of, device, kind, dtype):
    for vocab in VOCABS:
        logits = rows_of(kind, vocab).to(device, dtype)
        # Every cut meets every row: the rows repeated, offset against the cuts.
        logits = logits.repeat(3, 1)[: len(CUTS)]
        for temperature in (1.0, 0.3) if ON_GPU else (0.6,):
            draw = Draw(logits, CUTS, temperature)
            tokens = draw.run(kernels)
            draw.check(tokens)
            expected = draw.run(reference)
            assert (tokens != expected).sum() <= 1, kind  # a float tie, which `check` has found to be one


@settings(max_examples=300 if ON_GPU else 30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_draws_from_any_rows_equal_the_reference(kernels, reference, device, data):
    """A coarse grid of logits, so that most tie; vocabularies around the borders of runs, spans and tiles."""
    vocab = data.draw(st.sampled_from([2, 3, 255, 256, 257, 1023, 1024, 1025, 1300, 4096, 4097]))
    seed = data.draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    step, spread = data.draw(st.sampled_from([0.0, 0.25, 1.0])), data.draw(st.sampled_from([0.5, 3.0, 40.0]))
    logits = spread * torch.randn(3, vocab, generator=generator)
    logits = (logits / step).round() * step if step else logits
    banned = data.draw(st.sampled_from([0.0, 0.3, 0.99]))
    logits[:, 1:].masked_fill_(torch.rand(3, vocab - 1, generator=generator) < banned, -INF)
    cut = st.tuples(
        st.one_of(st.just(0), st.integers(1, vocab)),
        st.one_of(st.just(1.0), st.floats(2**-20, 1.0, width=32)),
        st.one_of(st.just(0.0), st.floats(1e-4, 1.0)),
    )
    cuts = data.draw(st.lists(cut, min_size=3, max_size=3))
    temperature = data.draw(st.sampled_from([1e-5, 0.1, 1.0, 2.7, 100.0]))
    draw = Draw(logits.to(device, data.draw(st.sampled_from(DTYPES))), cuts, temperature, seed)
    draw.check(draw.run(kernels))
    draw.check(draw.run(reference))


def test_only_the_rows_named_are_cut(kernels, device):
    logits = torch.randn(5, 3000, generator=torch.Generator().manual_seed(1)).to(device)
    draw = Draw(logits, [(1, 1.0, 0.0)], 1.0)
    whole = kernels.gumbel_argmax(logits, draw.draw)
    draw.cut = CutRows(torch.tensor([1, 4], device=device), *(column[:2] for column in draw.cut[1:]))
    tokens = draw.run(kernels)
    assert torch.equal(tokens[[0, 2, 3]], whole[[0, 2, 3]])
    assert torch.equal(tokens[[1, 4]], logits[[1, 4]].argmax(1))


def test_a_row_of_nothing_keeps_its_token(kernels, device):
    logits = torch.full((3, 2000), -INF, device=device)
    tokens = Draw(logits, [(5, 0.5, 0.1), (0, 0.5, 0.0), (1500, 1.0, 0.0)], 0.7).run(kernels)
    assert tokens.tolist() == [0, 0, 0]


@pytest.mark.parametrize("cut", [(0, 1.0, 0.0), (20, 1.0, 0.0), (0, 0.7, 0.0), (40, 0.8, 0.0), (0, 1.0, 0.3)], ids=str)
def test_draws_follow_the_truncated_distribution(kernels, device, cut):
    """Chi-square over many positions of one sequence."""
    count, vocab = (20_000, 300) if ON_GPU else (60, 20)
    row = 1.5 * torch.randn(1, vocab, generator=torch.Generator().manual_seed(5)).to(device)
    draw = Draw(row.expand(count, -1), [cut], 0.8)
    seeds, positions = torch.full_like(draw.draw.seeds, 77), torch.arange(count, device=device)
    draw.draw = draw.draw._replace(seeds=seeds, positions=positions)
    tokens = draw.run(kernels)
    limit = cutoff(row, draw.draw.temperature[:1], *(column[:1] for column in draw.cut[1:]))
    kept = (row >= limit[:, None])[0]
    expected = (row[0] / 0.8).masked_fill(~kept, -INF).double().softmax(0) * count
    counts = torch.bincount(tokens, minlength=vocab).double()
    assert counts[~kept].sum() == 0
    # Cells of fewer than 5 are counted together.
    small = kept & (expected < 5)
    cells, wanted = counts[kept & ~small], expected[kept & ~small]
    if small.any():
        cells = torch.cat([cells, counts[small].sum()[None]])
        wanted = torch.cat([wanted, expected[small].sum()[None]])
    degrees = cells.numel() - 1
    statistic = ((cells - wanted) ** 2 / wanted).sum().item()
    assert statistic < degrees + 4 * math.sqrt(2 * degrees) + 8  # about one in 10 000


def test_weights_are_powers_of_two_and_rise():
    logits = torch.linspace(-45, 0, 200_001)[None]
    highest, floor = torch.zeros(1), torch.full((1,), -INF)
    found = weights(logits, highest, torch.ones(1), floor)[0]
    assert (found.diff() >= 0).all()
    exact = logits[0].double().exp() * 2.0**40
    assert ((found - exact).abs() <= 1e-5 * exact + 1).all()
    assert weights(torch.tensor([[-INF, 0.0]]), highest, torch.ones(1), floor).tolist() == [[0, 2**40]]


def test_no_rows(each, device):
    draw = Draw(torch.zeros(2, 50, device=device), [(1, 1.0, 0.0)], 1.0)
    draw.cut = CutRows(*(column[:0] for column in draw.cut))
    tokens = torch.tensor([4, 5], device=device)
    each.truncate_draws(tokens, draw.logits, draw.draw, draw.cut)
    assert tokens.tolist() == [4, 5]


def test_bad_arguments_are_named(each, device):
    draw = Draw(torch.zeros(2, 50, device=device), [(1, 1.0, 0.0)], 1.0)
    tokens = torch.arange(2, device=device)
    for name in ("token_ids", "logits", *DrawRows._fields, *CutRows._fields):
        wrong_draw = {name: getattr(draw.draw, name).short()} if name in DrawRows._fields else {}
        wrong_cut = {name: getattr(draw.cut, name).short()} if name in CutRows._fields else {}
        token_ids = tokens.short() if name == "token_ids" else tokens
        logits = draw.logits.short() if name == "logits" else draw.logits
        with pytest.raises(ValueError, match=f"^{name} "):
            each.truncate_draws(token_ids, logits, draw.draw._replace(**wrong_draw), draw.cut._replace(**wrong_cut))
