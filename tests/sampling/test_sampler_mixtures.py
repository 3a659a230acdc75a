"""`sample` with any mixture of parameters: against a slow reference of one row, and one row against its batch."""

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.sampler import EOS, INF, VOCAB, Rig, mixed_rig, plain

from rayllm.api.sampling_params import SamplingParams
from rayllm.sampling.sampler import logprob_entries, sample
from rayllm_kernels.sampling.noise import gumbel_noise


def reference_scores(logits, params, prompt, output):
    """Logits after biases, bans and penalties, in float64."""
    scores = [float(x) for x in logits]
    for token, value in (params.logit_bias or {}).items():
        scores[token] += value
    if len(output) < params.min_tokens:
        for token in params.stop_token_ids + ([] if params.ignore_eos else EOS):
            scores[token] = -INF
    for token in set(prompt + output):
        scores[token] *= 1 / params.repetition_penalty if scores[token] > 0 else params.repetition_penalty
    for token in set(output):
        scores[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    return scores


def reference_token(logits, params, seed, prompt, output):
    scores = reference_scores(logits, params, prompt, output)
    highest = max(scores)
    if params.temperature < 1e-5:
        return scores.index(highest)
    scaled = [(x - highest) / params.temperature for x in scores]
    kept = [i for i, x in enumerate(scaled) if math.exp(x) >= params.min_p]
    if params.top_k > 0:
        kth = sorted(scaled[i] for i in kept)[-min(params.top_k, len(kept))]
        kept = [i for i in kept if scaled[i] >= kth]
    if params.top_p < 1:
        ranked = sorted(kept, key=lambda i: -scaled[i])
        total = sum(math.exp(scaled[i]) for i in kept)
        size = 1
        # Sums in another order can differ in the last bit, and all of them together be less than top_p of the total.
        while size < len(ranked) and sum(math.exp(scaled[i]) for i in ranked[:size]) < params.top_p * total:
            size += 1
        kept = [i for i in kept if scaled[i] >= scaled[ranked[size - 1]]]
    noise = gumbel_noise(torch.tensor([seed]), torch.tensor([len(prompt) + len(output)]), len(logits))[0].tolist()
    return max(kept, key=lambda i: scaled[i] + noise[i])


# All values are multiples of 1/4 or powers of 2, so that ties are exact in float32 as in float64.
quarters = st.integers(-40, 40).map(lambda n: n / 4)
token_ids = st.integers(0, VOCAB - 1)


@st.composite
def params_strategy(draw):
    def rarely(strategy, default):
        return draw(st.one_of(st.just(default), st.just(default), strategy))

    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.0, 1 / 64, 0.25, 1.0, 1.0, 2.0, 64.0])),
        top_k=rarely(st.sampled_from([-1, 1, 2, 5, VOCAB - 1, VOCAB, 1000]), 0),
        top_p=rarely(st.floats(0.0, 1.0, exclude_min=True), 1.0),
        min_p=rarely(st.sampled_from([0.001, 0.03, 0.3, 0.9, 1.0]), 0.0),
        repetition_penalty=rarely(st.sampled_from([0.5, 2.0, 4.0]), 1.0),
        presence_penalty=rarely(st.sampled_from([-2.0, -0.25, 0.5, 2.0]), 0.0),
        frequency_penalty=rarely(st.sampled_from([-2.0, -0.25, 0.5, 2.0]), 0.0),
        logit_bias=rarely(st.dictionaries(token_ids, quarters.map(lambda x: x * 2), max_size=5), None),
        min_tokens=rarely(st.integers(0, 8), 0),
        max_tokens=100,
        stop_token_ids=rarely(st.lists(token_ids, max_size=3), []),
        ignore_eos=draw(st.booleans()),
        logprobs=rarely(st.integers(0, 20), None),
    )


sequences_strategy = st.lists(
    st.tuples(
        params_strategy(),
        st.integers(0, 2**63 - 1),
        st.lists(token_ids, min_size=1, max_size=10),
        st.lists(token_ids, max_size=12),
    ),
    min_size=1,
    max_size=7,
)


@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(sequences=sequences_strategy, data=st.data())
def test_any_mixture_equals_the_reference_and_itself_in_any_batch(sequences, data):
    count = len(sequences)
    row = st.lists(quarters, min_size=VOCAB, max_size=VOCAB)
    logits = torch.tensor(data.draw(st.lists(row, min_size=count, max_size=count)))
    rows = data.draw(st.permutations(range(10)))[:count]
    rig = Rig(sequences, rows=rows)
    before = logits.clone()
    output = rig.sample(logits)
    tokens = output.token_ids.tolist()
    assert torch.equal(logits, before)

    assert tokens == [reference_token(logits[i].tolist(), *sequences[i]) for i in range(count)]
    order = data.draw(st.permutations(range(count)))
    assert rig.tokens(logits, order) == [tokens[i] for i in order]
    for i in range(count):
        assert rig.tokens(logits, [i]) == [tokens[i]]
    half = list(order)[: (count + 1) // 2]
    assert rig.tokens(logits, half) == [tokens[i] for i in half]
    check_logprobs(rig, logits, output)


def check_logprobs(rig, logits, output):
    """Every row has the log-probabilities it asked for, of the raw logits."""
    entries = logprob_entries(output.to_host(), rig.batch())
    asked = [params.logprobs for params, _, _, _ in rig.sequences]
    if all(k is None for k in asked):
        assert output.logprobs is None
        assert entries is None
        return
    expected = logits.double().log_softmax(dim=1)
    for i, k in enumerate(asked):
        if k is None:
            assert entries[i] is None
            continue
        token = output.token_ids[i].item()
        assert entries[i].token_id == token
        assert entries[i].logprob == pytest.approx(expected[i, token].item(), abs=1e-5)
        assert entries[i].rank == 1 + (logits[i] > logits[i, token]).sum().item()
        ranking = sorted(range(VOCAB), key=lambda v: (-logits[i, v].item(), v))
        assert entries[i].top_ids == ranking[:k]
        assert entries[i].top_logprobs == pytest.approx(expected[i, ranking[:k]].tolist(), abs=1e-5)


def test_large_mixed_batch_equals_its_rows():
    """Continuous logits and a real vocabulary: sums over rows are long enough to depend on the order of addition."""
    count, vocab_size = 40, 5003
    rig = mixed_rig(count, vocab_size)
    logits = torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(1)) * 2
    tokens = rig.tokens(logits)
    assert [rig.tokens(logits, [i])[0] for i in range(count)] == tokens
    generator = torch.Generator().manual_seed(2)
    for size in (count, 23, 7):
        order = torch.randperm(count, generator=generator).tolist()[:size]
        assert rig.tokens(logits, order) == [tokens[i] for i in order]


def test_a_truncated_neighbour_does_not_change_rounding():
    """Near 20 000 float32 steps by 0.002: a draw after other arithmetic would often be another token."""
    count = 2000
    logits = 20 + 0.001 * torch.randn(count + 1, 50, generator=torch.Generator().manual_seed(8))
    rig = Rig([plain(5, temperature=0.001), plain(6, top_k=3, top_p=0.5)], 50)
    rows, positions = np.array([0] * count + [1]), np.arange(2, count + 3)
    alone = sample(logits[:count], rig.table.batch(rows[:count], positions[:count], "cpu"), rig.token_table)
    together = sample(logits, rig.table.batch(rows, positions, "cpu"), rig.token_table)
    assert torch.equal(together.token_ids[:count], alone.token_ids)


def test_threads_do_not_change_tokens():
    rig = mixed_rig(20, 20_000)
    logits = torch.randn(20, 20_000, generator=torch.Generator().manual_seed(3))
    threads = torch.get_num_threads()
    results = []
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            results.append([rig.tokens(logits), [rig.tokens(logits, [i])[0] for i in range(20)]])
    finally:
        torch.set_num_threads(threads)
    assert results[0][0] == results[0][1] == results[1][0] == results[1][1]
