"""`sample` with `SamplingTable`: against a slow reference of one row, and one row against the batch it is in."""

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from rayllm.sample.sampler import logprob_entries, sample
from rayllm.sample.sampling_table import SamplingTable
from rayllm.sampling_params import SamplingParams
from rayllm.types import SequenceData
from rayllm_kernels.reference_noise import gumbel_noise

INF = float("inf")
VOCAB = 24
EOS = [2, 5]
MAX_LEN = 40


class Rig:
    """Sequences in a table of their own, as a worker has them. sequences: (params, seed, prompt, output) each."""

    def __init__(self, sequences, vocab_size=VOCAB, rows=None):
        self.sequences = sequences
        self.rows = np.arange(len(sequences)) if rows is None else np.asarray(rows)
        size = int(self.rows.max(initial=0)) + 1
        self.table = SamplingTable(size, vocab_size, EOS)
        # Stale tokens everywhere: only the known ones may count.
        self.token_table = torch.full((size, MAX_LEN), 1, dtype=torch.int32)
        for row, (params, seed, prompt, output) in zip(self.rows.tolist(), sequences, strict=True):
            tokens = prompt + output
            self.table.set(SequenceData(row, tokens, len(prompt), 0, [], params, seed))
            self.token_table[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        self.positions = np.array([len(prompt) + len(output) for _, _, prompt, output in sequences], dtype=np.int64)
        self.table.check_integrity()

    def batch(self, order=None):
        order = np.arange(len(self.sequences)) if order is None else np.asarray(order, dtype=np.int64)
        return self.table.batch(self.rows[order], self.positions[order], "cpu")

    def sample(self, logits, order=None):
        """Tokens of the sequences `order` (all), whose logits are logits[order]."""
        rows = logits if order is None else logits[list(order)]
        return sample(rows, self.batch(order), self.token_table)

    def tokens(self, logits, order=None):
        return self.sample(logits, order).token_ids.tolist()


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
        while sum(math.exp(scaled[i]) for i in ranked[:size]) < params.top_p * total:
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


MIXED = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.7, "top_p": 0.9},
    {"top_k": 20},
    {"top_k": 50, "top_p": 0.8, "min_p": 0.01},
    {"min_p": 0.05, "presence_penalty": 1.0},
    {"temperature": 0.0, "frequency_penalty": 0.5},
    {"temperature": 3.0, "repetition_penalty": 1.2, "logprobs": 2},
    {"temperature": 1.3, "logit_bias": {17: 5.0}, "min_tokens": 9},
    {"temperature": 0.01, "top_p": 0.5, "logprobs": 0},
]


def mixed_rig(count, vocab_size):
    generator = np.random.default_rng(0)
    sequences = []
    for i in range(count):
        length = int(generator.integers(1, 15))
        prompt, output = (
            generator.integers(0, vocab_size, n).tolist() for n in (length, int(generator.integers(0, 20)))
        )
        params = SamplingParams(max_tokens=100, **MIXED[i % len(MIXED)])
        sequences.append((params, int(generator.integers(0, 2**63)), prompt, output))
    return Rig(sequences, vocab_size)


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


def plain(seed=0, prompt=(1, 1), output=(), **params):
    return SamplingParams(max_tokens=100, **params), seed, list(prompt), list(output)


def frequencies(logits, count=20_000, **params):
    """How often each token is drawn, over many positions of one sequence, from the same logits."""
    rig = Rig([plain(seed=99, **params)], len(logits))
    batch = rig.table.batch(np.zeros(count, dtype=np.int64), np.arange(2, count + 2), "cpu")
    drawn = sample(torch.tensor(logits).expand(count, -1), batch, rig.token_table).token_ids
    return torch.bincount(drawn, minlength=len(logits)).double() / count


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [0.4, 0.3, 0.2, 0.1]),
        ({"temperature": 0.5}, [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
        ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_p": 0.75}, [4 / 9, 3 / 9, 2 / 9, 0]),
        ({"min_p": 0.6}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_k": 3, "top_p": 0.7}, [4 / 7, 3 / 7, 0, 0]),  # 7/9 of the three kept; 0.7 of all would be just 2 too
        ({"top_k": 3, "top_p": 0.44}, [1, 0, 0, 0]),  # 4/9 of the three kept, but 0.4 of all
        ({"logit_bias": {3: math.log(6.0)}, "top_k": 1}, [0, 0, 0, 1]),
    ],
    ids=str,
)
def test_tokens_are_drawn_as_often_as_they_should(params, expected):
    found = frequencies([math.log(p) for p in (0.4, 0.3, 0.2, 0.1)], **params)
    for share, wanted in zip(found.tolist(), expected, strict=True):
        assert share == pytest.approx(wanted, abs=4 * math.sqrt(wanted * (1 - wanted) / 20_000))


def test_same_seed_same_tokens_and_other_seeds_others():
    logits = torch.zeros(4, 1000)
    rig = Rig([plain(7), plain(7), plain(8), plain(7 + 2**32)], 1000)
    tokens = rig.tokens(logits)
    assert tokens == rig.tokens(logits)
    assert tokens[0] == tokens[1]
    assert len(set(tokens)) == 3


def test_position_not_row_decides_the_noise():
    """A preempted sequence comes back in another row, its output now part of the tokens it enters with."""
    logits = torch.zeros(1, 1000)
    first = Rig([plain(7, prompt=[1, 2, 3])], 1000)
    tokens = []
    for step in range(20):
        tokens += sample(
            logits, first.table.batch(np.array([0]), np.array([3 + step]), "cpu"), first.token_table
        ).token_ids
    assert len(set(tokens)) > 15
    resumed = Rig([plain(7, prompt=[1, 2, 3], output=[int(t) for t in tokens[:11]])], 1000, rows=[4])
    assert resumed.tokens(logits) == [tokens[11]]


def test_greedy_takes_the_lowest_of_tied_tokens():
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0]]).repeat(2, 1)
    rig = Rig([plain(temperature=0.0), plain(temperature=1.0)], 4)
    assert rig.tokens(logits, [0]) == [1]
    assert rig.tokens(logits)[0] == 1


def test_greedy_with_penalties():
    logits = torch.tensor([[3.0, 2.5, 2.0, -1.0]]).repeat(4, 1)
    rig = Rig(
        [
            plain(temperature=0.0, prompt=[0], output=[]),
            plain(temperature=0.0, prompt=[0], output=[], repetition_penalty=2.0),
            plain(temperature=0.0, prompt=[0], output=[1, 0], presence_penalty=1.5),
            plain(temperature=0.0, prompt=[1], output=[0], frequency_penalty=0.25),
        ],
        4,
    )
    assert rig.tokens(logits) == [0, 1, 2, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logit_bias_forces_and_forbids(temperature):
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(4))
    best = int(logits[1].argmax())
    forbidden = {token: -100.0 for token in range(VOCAB) if token != best}
    for seed in range(30):
        rig = Rig(
            [
                plain(seed, temperature=temperature, logit_bias={9: 100.0}),
                plain(seed, temperature=temperature, logit_bias=forbidden),
            ]
        )
        assert rig.tokens(logits) == [9, best]


def test_min_tokens_hold_back_every_end_until_they_are_reached():
    logits = torch.full((1, VOCAB), -1.0)
    logits[0, [2, 5, 11]] = torch.tensor([5.0, 4.0, 3.0])  # both EOS ids, then a stop id
    logits[0, 7] = 0.0

    def token(num_output, **params):
        sequence = plain(temperature=0.0, prompt=[1, 1, 1], output=[1] * num_output, **params)
        return Rig([sequence]).tokens(logits)[0]

    assert token(0) == 2
    for num_output, expected in ((0, 7), (2, 7), (3, 2), (4, 2)):
        assert token(num_output, min_tokens=3, stop_token_ids=[11]) == expected
    assert token(0, min_tokens=3) == 11
    assert token(0, min_tokens=3, ignore_eos=True) == 2
    assert token(0, min_tokens=3, ignore_eos=True, stop_token_ids=[2, 5]) == 11


def test_biases_cannot_undo_bans():
    logits = torch.zeros(1, VOCAB)
    rig = Rig([plain(temperature=0.0, min_tokens=1, logit_bias={2: 100.0, 5: 99.0, 8: 1.0})])
    assert rig.tokens(logits) == [8]


class NoNans(TorchDispatchMode):
    """Fails at the first operation that yields a NaN."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                assert not tensor.isnan().any(), f"{func} yields NaN"
        return result


EXTREMES = [
    {"temperature": 1e-5},
    {"temperature": 1e-5, "top_k": 3, "top_p": 0.5, "min_p": 0.1},
    {"temperature": 100.0, "top_p": 1e-9},
    {"top_p": 0.999999},
    {"repetition_penalty": 100.0, "presence_penalty": -2.0, "frequency_penalty": 2.0},
    {"repetition_penalty": 1e-6},
    {"repetition_penalty": 1e-60, "temperature": 0.0},
    {"repetition_penalty": 1e-60, "top_k": 20, "top_p": 0.5},
    {"temperature": 0.0, "logprobs": 3},
    {"min_p": 1.0},
]


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e4, 1e30])
def test_extremes_yield_tokens_that_exist(scale):
    """Huge and tiny logits, most of them -inf, at extreme parameters: always a token that is not -inf."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(len(EXTREMES), 50, generator=generator) * scale
    logits[torch.rand(logits.shape, generator=generator) < 0.7] = -INF
    logits[:, 30:] = -INF
    logits[:, 4] = scale
    rig = Rig([plain(seed, output=[4, 4, 7], **params) for seed, params in enumerate(EXTREMES)], 50)
    with NoNans():
        output = rig.sample(logits)
    assert (logits.gather(1, output.token_ids[:, None]) > -INF).all()
    assert rig.tokens(logits, [0]) == [logits[0].argmax()] or scale < 1
    for entry in logprob_entries(output, rig.batch()):
        assert entry is None or (entry.logprob <= 0 and not any(math.isnan(x) for x in entry.top_logprobs))


def test_only_one_token_left():
    logits = torch.full((3, 50), -INF)
    logits[:, 33] = -7.0
    rig = Rig([plain(3, **params) for params in ({}, {"top_k": 5, "top_p": 0.1}, {"min_p": 0.5})], 50)
    assert rig.tokens(logits) == [33, 33, 33]


def test_a_row_without_any_token_harms_no_other():
    logits = torch.zeros(2, 50)
    logits[0] = -INF
    sequences = [plain(3, top_k=5, top_p=0.5, min_p=0.1), plain(4, top_k=40, top_p=0.5)]
    with NoNans():
        tokens = Rig(sequences, 50).tokens(logits)
    assert 0 <= tokens[0] < 50
    assert tokens[1:] == Rig(sequences, 50).tokens(logits, [1])


def test_half_precision_logits_are_sampled_as_float32():
    logits = torch.randn(10, 300, generator=torch.Generator().manual_seed(6)).bfloat16()
    rig = mixed_rig(10, 300)
    assert rig.tokens(logits) == rig.tokens(logits.float())


def test_wrong_number_of_rows_is_refused():
    rig = Rig([plain(), plain()])
    with pytest.raises(ValueError, match="3 rows of logits for a batch of 2"):
        sample(torch.zeros(3, VOCAB), rig.batch(), rig.token_table)


def test_no_rows():
    rig = Rig([plain(logprobs=2, top_k=3)])
    output = rig.sample(torch.zeros(1, VOCAB), [])
    assert output.token_ids.shape == (0,)
    assert output.logprobs is None
