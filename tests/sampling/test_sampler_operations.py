"""Each operation of the sampler against a slow reference, or transformers, on its own."""

import math

import pytest
import torch

from rayllm.sampling import logprobs
from rayllm.sampling.sampling_batch import BanEntries, BiasEntries
from rayllm_kernels import ops
from rayllm_kernels.sampling.truncation import cutoff

INF = float("inf")


def limits_of(logits, top_k=0, top_p=1.0, min_p=0.0):
    """Cutoffs of rows that all have the same parameters."""
    count = logits.shape[0]
    return cutoff(
        logits,
        torch.ones(count),
        torch.full((count,), top_k),
        torch.full((count,), top_p),
        torch.full((count,), math.log(min_p) if min_p > 0 else -INF),
    )


def kept_of(logits, **params):
    return logits >= limits_of(logits, **params)[:, None]


def reference_kept(logits, top_k=0, top_p=1.0, min_p=0.0):
    """Indices kept of one row (a list), by the words of the definition; float64."""
    weights = [math.exp(x - max(logits)) for x in logits]
    kept = [i for i, w in enumerate(weights) if w >= min_p]
    if top_k > 0:
        kth = sorted((logits[i] for i in kept), reverse=True)[:top_k][-1]
        kept = [i for i in kept if logits[i] >= kth]
    if top_p < 1.0:
        total = sum(weights[i] for i in kept)
        mass, last = 0.0, None
        for i in sorted(kept, key=lambda i: -logits[i]):
            if last is not None and mass >= top_p * total and logits[i] != last:
                break
            mass, last = mass + weights[i], logits[i]
        kept = [i for i in kept if logits[i] >= last]
    return kept


CUTS = [
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 399},
    {"top_p": 0.9},
    {"top_p": 0.05},
    {"top_p": 0.9999},
    {"min_p": 0.02},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.8},
    {"top_k": 200, "top_p": 0.95},
    {"min_p": 0.05, "top_k": 60, "top_p": 0.7},
]


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_kept_sets_are_those_of_transformers(cut):
    from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    warpers = {"min_p": MinPLogitsWarper, "top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper}
    logits = torch.randn(64, 400, generator=torch.Generator().manual_seed(2)) * torch.linspace(0.2, 6, 64)[:, None]
    expected = logits.clone()
    for name in ("min_p", "top_k", "top_p"):
        if name in cut:
            expected = warpers[name](cut[name])(None, expected)
    assert torch.equal(kept_of(logits, **cut), expected > -INF)


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_kept_sets_with_ties_and_bans(cut):
    """Logits on a coarse grid: most tokens tie with others."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randint(-8, 9, (48, 400), generator=generator).float()
    logits[::2] *= 0.5
    logits[torch.rand(48, 400, generator=generator) < 0.2] = -INF
    kept = kept_of(logits, **cut)
    for row in range(48):
        expected = reference_kept(logits[row].tolist(), **cut)
        # Banned tokens are above no cutoff but -inf; they cannot be drawn either way.
        found = [i for i in kept[row].nonzero()[:, 0].tolist() if logits[row, i] > -INF]
        assert found == [i for i in expected if logits[row, i] > -INF]


def test_rows_of_one_batch_keep_their_own_sets():
    """Rows with different parameters, whichever way the candidates were found."""
    logits = torch.randn(5, 400, generator=torch.Generator().manual_seed(4)) * 3
    top_k = torch.tensor([3, 50, 0, 20, 0])
    top_p = torch.tensor([1.0, 0.9, 1.0, 0.5, 1.0])
    log_min_p = torch.tensor([-INF, -INF, -INF, -6.0, -2.0])
    ones = torch.ones(5)
    by_selection = cutoff(logits, ones, top_k, top_p, log_min_p)
    # One more row, with top_p alone, makes all of them look at every token.
    more = [torch.cat([t, t[:1]]) for t in (logits, ones, top_k, top_p, log_min_p)]
    more[2][5], more[3][5] = 0, 0.5
    assert torch.equal(cutoff(*more)[:5], by_selection)
    for row in range(5):
        params = {"top_k": int(top_k[row]), "top_p": top_p[row].item(), "min_p": log_min_p[row].exp().item()}
        expected = reference_kept(logits[row].tolist(), **params)
        assert (logits[row] >= by_selection[row]).nonzero()[:, 0].tolist() == expected
        if params["min_p"] == 0:
            assert limits_of(logits[row : row + 1], **params) == by_selection[row]


def test_ties_beyond_the_candidates_count_in_the_total():
    """400 equal tokens and top_k = 2: all tie with the second, so all are kept, and share the probability."""
    logits = torch.zeros(1, 400)
    assert kept_of(logits, top_k=2, top_p=0.5).all()
    logits[0, 7] = 3.0  # 20.1 against 399 others: 4.8% of the whole
    assert kept_of(logits, top_k=2, top_p=0.04).sum() == 1
    assert kept_of(logits, top_k=2, top_p=0.06).sum() == 400


def test_top_p_keeps_the_most_likely_token():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(5))
    kept = kept_of(logits, top_p=1e-6)
    assert (kept.sum(dim=1) == 1).all()
    assert torch.equal(kept.int().argmax(dim=1), logits.argmax(dim=1))


def test_top_p_of_exact_probabilities():
    """1/2, 1/4, 1/8, 1/8: the smallest set that reaches p, at p and just beside it."""
    logits = torch.tensor([[0.25, 0.125, 0.5, 0.125]]).log()
    for top_p, expected in ((0.49, 1), (0.5, 1), (0.51, 2), (0.74, 2), (0.76, 4), (0.99, 4)):
        assert kept_of(logits, top_p=top_p).sum() == expected, top_p


def penalised(logits, history, num_prompt, num_tokens, repetition, presence, frequency):
    """All rows of logits penalised, in a new tensor; row i has history row i."""
    result, rows = logits.clone(), torch.arange(logits.shape[0])
    penalties = ops.PenaltyRows(rows, rows, num_prompt, num_tokens, repetition, presence, frequency)
    ops.penalise(result, history, penalties)
    return result


def reference_penalties(logits, prompt, output, repetition, presence, frequency):
    result = list(logits)
    for token in set(prompt) | set(output):
        result[token] = result[token] / repetition if result[token] > 0 else result[token] * repetition
    for token in set(output):
        result[token] -= frequency * output.count(token) + presence
    return result


def test_penalties():
    generator = torch.Generator().manual_seed(6)
    vocab_size, length = 20, 30
    logits = torch.randn(6, vocab_size, generator=generator) * 2
    logits[0, 3] = -INF
    history = torch.randint(0, vocab_size, (6, length), generator=generator, dtype=torch.int32)
    num_prompt = torch.tensor([5, 5, 0, 12, 3, 30])
    num_tokens = torch.tensor([30, 17, 9, 12, 4, 30])
    repetition = torch.tensor([1.0, 1.5, 0.5, 2.0, 1.0, 1.1])
    presence = torch.tensor([0.5, 0.0, -1.5, 1.0, 2.0, 1.0])
    frequency = torch.tensor([0.25, 0.0, 1.0, -0.5, 0.0, 1.0])
    result = penalised(logits, history, num_prompt, num_tokens, repetition, presence, frequency)
    for row in range(6):
        tokens = history[row, : num_tokens[row]].tolist()
        prompt, output = tokens[: num_prompt[row]], tokens[num_prompt[row] :]
        expected = reference_penalties(
            logits[row].tolist(), prompt, output, repetition[row].item(), presence[row].item(), frequency[row].item()
        )
        torch.testing.assert_close(result[row], torch.tensor(expected))


def test_repetition_penalty_is_that_of_transformers():
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(7))
    history = torch.randint(0, 40, (3, 25), generator=torch.Generator().manual_seed(8), dtype=torch.int32)
    full, none = torch.full((3,), 25), torch.zeros(3)
    result = penalised(logits, history, torch.tensor([0, 10, 25]), full, torch.full((3,), 1.3), none, none)
    torch.testing.assert_close(result, RepetitionPenaltyLogitsProcessor(1.3)(history.long(), logits))


def test_penalties_ignore_ids_outside_of_the_vocabulary():
    """Multimodal placeholders, or a padded table."""
    logits = torch.ones(1, 4)
    history = torch.tensor([[9, 4, 1, 2**31 - 1]], dtype=torch.int32)
    one = torch.ones(1)
    result = penalised(logits, history, torch.tensor([0]), torch.tensor([4]), one, one, one)
    assert result.tolist() == [[1.0, -1.0, 1.0, 1.0]]


def test_bias_and_bans_touch_their_entries_only():
    logits = torch.randn(3, 6, generator=torch.Generator().manual_seed(9))
    expected = logits.clone()
    expected[0, 5] += 2.5
    expected[2, 0] -= 100
    expected[2, 5] += 1
    biases = torch.tensor([0, 2, 2]), torch.tensor([5, 0, 5]), torch.tensor([2.5, -100.0, 1.0])
    BiasEntries(*biases).apply(logits)
    assert torch.equal(logits, expected)
    expected[1, 2] = expected[2, 5] = -INF
    BanEntries(torch.tensor([1, 2, 1]), torch.tensor([2, 5, 2])).apply(logits)
    assert torch.equal(logits, expected)


def test_logprobs_are_log_softmax():
    logits = torch.randn(7, 300, generator=torch.Generator().manual_seed(10)) * 5
    logits[2, 100:] = -INF
    logits[3] += 1e4
    token_ids = torch.tensor([0, 299, 7, 7, 150, int(logits[5].argmax()), int(logits[6].argmin())])
    result = logprobs.gather(logits, torch.arange(7), token_ids, 5)
    expected = logits.double().log_softmax(dim=1)
    chosen = expected.gather(1, token_ids[:, None])
    torch.testing.assert_close(result.logprobs.double(), chosen[:, 0], atol=1e-5, rtol=1e-5)
    assert torch.equal(result.ranks, (expected > chosen).sum(dim=1) + 1)
    assert result.ranks[5] == 1
    assert result.ranks[6] == 300
    top = expected.topk(5, dim=1)
    assert torch.equal(result.top_ids, top.indices)
    torch.testing.assert_close(result.top_logprobs.double(), top.values, atol=1e-5, rtol=1e-5)
    assert torch.equal(result.token_ids, token_ids)


def test_top_tokens_of_equal_logits_come_in_order_of_id():
    logits = torch.tensor([[-0.0, 2.0, 0.0, 2.0, -5.0, -INF, -1.0, 2.0, -5.0]])
    result = logprobs.gather(logits, torch.tensor([0]), torch.tensor([3]), 9)
    assert result.top_ids.tolist() == [[1, 3, 7, 0, 2, 6, 4, 8, 5]]
    assert result.ranks.tolist() == [1]
    assert result.top_logprobs[0, -1] == -INF


def test_prompt_logprobs():
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(11))
    targets = torch.tensor([3, 29, 0, 11])
    log_softmax = logits.log_softmax(dim=1)
    for num_top in (0, 3):
        entries = logprobs.prompt_logprobs(logits, targets, num_top)
        for row, entry in enumerate(entries):
            assert entry.token_id == targets[row]
            assert entry.logprob == pytest.approx(log_softmax[row, targets[row]].item(), abs=1e-5)
            assert entry.rank == 1 + (log_softmax[row] > log_softmax[row, targets[row]]).sum()
            assert entry.top_ids == log_softmax[row].topk(num_top).indices.tolist()
            assert entry.top_logprobs == pytest.approx(log_softmax[row].topk(num_top).values.tolist(), abs=1e-5)
    assert logprobs.prompt_logprobs(logits[:0], targets[:0], 3) == []
