"""Drawing, truncating, penalising and reporting: each kernel against its reference, on rows made to mislead it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayllm_kernels import reference
from rayllm_kernels.reference_noise import gumbel_noise
from rayllm_kernels.reference_truncation import cutoff, weights

ON_GPU = torch.cuda.is_available()
INF = float("inf")
VOCABS = [151_936, 128_256, 50_257] if ON_GPU else [5_000]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def rows_of(kind: str, vocab: int) -> torch.Tensor:
    """A few rows [N, V] float32 of one kind."""
    generator = torch.Generator().manual_seed(len(kind))
    rows = torch.randn(6, vocab, generator=generator)
    if kind == "flat":
        return rows
    if kind == "peaked":
        return 8 * rows
    if kind == "ties":
        return (2 * rows).round()
    if kind == "equal":
        return torch.zeros_like(rows)
    if kind == "ascending":
        return torch.linspace(-20, 20, vocab).repeat(6, 1)
    if kind == "mostly banned":
        return rows.masked_fill_(torch.rand(rows.shape, generator=generator) < 0.98, -INF)
    if kind == "one token":
        only = torch.full_like(rows, -INF)
        only[torch.arange(6), torch.randint(0, vocab, (6,), generator=generator)] = -50.0
        return only
    if kind == "one group":  # the largest all in one residue class, so that maxima of strided groups say little
        rows[:, :: 4096 if vocab > 50_000 else 512] += 20
        return rows
    assert kind == "huge"
    return rows * 1e4


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
        self.logits = logits
        self.seeds = (torch.arange(count) * 7919 + seed).to(device)
        self.positions = (torch.arange(count) % 100 + 3).to(device)
        self.temperature = torch.full((count,), temperature, device=device)
        chosen = [cuts[i % len(cuts)] for i in range(count)]
        self.rows = torch.arange(count, device=device)
        self.top_k = torch.tensor([min(k, logits.shape[1] - 1) for k, _, _ in chosen], device=device)
        self.top_p = torch.tensor([p for _, p, _ in chosen], device=device)
        self.log_min_p = torch.tensor([math.log(m) if m else -INF for _, _, m in chosen], device=device)

    def run(self, module) -> torch.Tensor:
        ones = torch.ones_like(self.temperature)
        tokens = module.gumbel_argmax(self.logits, self.seeds, self.positions, self.temperature, ones)
        module.truncate_draws(
            tokens,
            self.logits,
            self.rows,
            self.top_k,
            self.top_p,
            self.log_min_p,
            self.seeds,
            self.positions,
            self.temperature,
        )
        return tokens

    def check(self, tokens: torch.Tensor) -> None:
        """Each token is kept, exactly, and its score is the best of the kept up to what logarithms round."""
        wide = self.logits.float()
        limits = cutoff(wide, self.temperature, self.top_k, self.top_p, self.log_min_p)
        taken = wide.gather(1, tokens[:, None])[:, 0]
        assert (taken >= limits).all()
        assert (taken > -INF).all()
        scaled = wide * (1.0 / self.temperature)[:, None]
        scores = scaled + gumbel_noise(self.seeds, self.positions, wide.shape[1])
        scores.masked_fill_(wide < limits[:, None], -INF)
        best = scores.amax(dim=1)
        reached = scores.gather(1, tokens[:, None])[:, 0]
        assert (reached >= best - 1e-5 - 1e-6 * best.abs()).all()


@pytest.mark.parametrize("kind", KINDS)
# The interpreter takes seconds a case; the other dtypes are among what the next test draws.
@pytest.mark.parametrize("dtype", DTYPES if ON_GPU else [torch.bfloat16])
def test_draws_from_adversarial_rows_equal_the_reference(kernels, device, kind, dtype):
    for vocab in VOCABS:
        logits = rows_of(kind, vocab).to(device, dtype)
        # Every cut meets every row: the rows repeated, offset against the cuts.
        logits = logits.repeat(3, 1)[: len(CUTS)]
        for temperature in (1.0, 0.3):
            draw = Draw(logits, CUTS, temperature)
            tokens = draw.run(kernels)
            draw.check(tokens)
            expected = draw.run(reference)
            assert (tokens != expected).sum() <= 1, kind  # a float tie, which `check` has found to be one


@settings(max_examples=300 if ON_GPU else 40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_draws_from_any_rows_equal_the_reference(kernels, device, data):
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
    ones = torch.ones(5, device=device)
    whole = kernels.gumbel_argmax(logits, draw.seeds, draw.positions, draw.temperature, ones)
    draw.rows = torch.tensor([1, 4], device=device)
    draw.top_k, draw.top_p, draw.log_min_p = draw.top_k[:2], draw.top_p[:2], draw.log_min_p[:2]
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
    count, vocab = (20_000, 300) if ON_GPU else (100, 30)
    row = 1.5 * torch.randn(1, vocab, generator=torch.Generator().manual_seed(5)).to(device)
    draw = Draw(row.expand(count, -1), [cut], 0.8)
    draw.seeds = torch.full_like(draw.seeds, 77)
    draw.positions = torch.arange(count, device=device)
    tokens = draw.run(kernels)
    limit = cutoff(row, draw.temperature[:1], draw.top_k[:1], draw.top_p[:1], draw.log_min_p[:1])
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


PENALTIES = [
    (1.0, 0.0, 0.0),
    (1.3, 0.5, 0.25),
    (0.5, -2.0, -1.5),
    (100.0, 2.0, 2.0),
    (1e-30, 0.0, 0.0),
    (2.0, 0.0, 0.1),
]


@pytest.mark.parametrize("vocab", [40, 5000, *(VOCABS if ON_GPU else [])])
@pytest.mark.parametrize("length", [1, 100, 3000])
def test_penalties_equal_the_reference(kernels, device, vocab, length):
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
    arguments = [table, rows, table_rows, num_prompt, num_tokens, repetition, presence, frequency]
    arguments = [tensor.to(device) for tensor in arguments]
    expected, actual = logits.to(device), logits.to(device, copy=True)
    expected = expected.clone()
    reference.penalise(expected, *arguments)
    kernels.penalise(actual, *arguments)
    assert torch.equal(actual, expected)
    assert torch.equal(actual[[1, 5, 6]].cpu(), logits[[1, 5, 6]])
    assert (actual < INF).all()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "one token"])
@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_logprobs_equal_the_reference(kernels, device, kind, num_top):
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


def test_no_rows(kernels, device):
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(0)).to(device)
    nobody = torch.zeros(0, dtype=torch.int64, device=device)
    nothing = torch.zeros(0, device=device)
    tokens, ones, before = torch.tensor([4, 5], device=device), torch.ones(2, device=device), logits.clone()
    for module in (reference, kernels):
        module.truncate_draws(tokens, logits, nobody, nobody, nothing, nothing, tokens, tokens, ones)
        table = torch.zeros(2, 4, dtype=torch.int32, device=device)
        module.penalise(logits, table, nobody, nobody, nobody, nobody, nothing, nothing, nothing)
        assert [tuple(t.shape) for t in module.gather_logprobs(logits, nobody, nobody, 3)] == [
            (0,),
            (0,),
            (0, 3),
            (0, 3),
        ]
    assert tokens.tolist() == [4, 5]
    assert torch.equal(logits, before)


def test_bad_arguments_are_named(kernels, device):
    logits = torch.zeros(2, 50, device=device)
    rows, ones = torch.arange(2, device=device), torch.ones(2, device=device)
    table = torch.zeros(2, 4, dtype=torch.int32, device=device)
    cases = {
        "truncate_draws": (
            ["token_ids", "logits", "rows", "top_k", "top_p", "log_min_p", "seeds", "positions", "temperature"],
            [rows, logits, rows, rows, ones, ones, rows, rows, ones],
        ),
        "penalise": (
            [
                "logits",
                "token_table",
                "rows",
                "table_rows",
                "num_prompt_tokens",
                "num_tokens",
                "repetition",
                "presence",
                "frequency",
            ],
            [logits, table, rows, rows, rows, rows, ones, ones, ones],
        ),
        "gather_logprobs": (["logits", "rows", "token_ids"], [logits, rows, rows]),
    }
    for operation, (names, arguments) in cases.items():
        extra = [3] if operation == "gather_logprobs" else []
        for index, name in enumerate(names):
            bad = list(arguments)
            bad[index] = bad[index].to(torch.int16)
            for module in (reference, kernels):
                with pytest.raises(ValueError, match=f"^{name} "):
                    getattr(module, operation)(*bad, *extra)
    for module in (reference, kernels):
        with pytest.raises(ValueError, match=r"^num_top "):
            module.gather_logprobs(logits, rows, rows, 51)
