"""`sample` with `SamplingTable`, feature by feature: what users are promised, and what happens at the extremes."""

import math

import numpy as np
import pytest
import torch
from support.sampler import INF, VOCAB, Rig, mixed_rig, plain
from torch.utils._python_dispatch import TorchDispatchMode

from rayllm.sampling.sampler import logprob_entries, sample


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
