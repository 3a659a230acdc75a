"""`SamplingTable`: which features a batch reports, what it hands to the device, and what outlives a row."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rayllm.api.sampling_params import SamplingParams
from rayllm.api.types import SequenceData
from rayllm.sampling.sampler import sample
from rayllm.sampling.sampling_table import SamplingTable
from rayllm_kernels import dispatch, ops

VOCAB = 100
ALL_FEATURES = {
    "top_k": 5,
    "top_p": 0.9,
    "min_p": 0.1,
    "presence_penalty": 1.0,
    "logit_bias": {3: 1.0},
    "min_tokens": 4,
    "logprobs": 2,
}


def entering(row, seed=0, num_prompt=3, num_tokens=None, **params):
    num_tokens = num_prompt if num_tokens is None else num_tokens
    return SequenceData(row, [1] * num_tokens, num_prompt, 0, [], SamplingParams(max_tokens=50, **params), seed)


def table_of(*sequences, size=8):
    table = SamplingTable(size, VOCAB, [2])
    for sequence in sequences:
        table.set(sequence)
    table.check_integrity()
    return table


def batch_of(table, rows, positions, device="cpu"):
    return table.batch(np.array(rows, dtype=np.int64), np.array(positions, dtype=np.int64), device)


def features_of(batch):
    return {
        name for name in ("draw", "cut", "penalties", "bias", "bans", "logprobs") if getattr(batch, name) is not None
    }


def test_what_rows_of_beams_and_of_the_best_samples_report():
    table = table_of(
        entering(0, use_beam_search=True, best_of=4, n=2),
        entering(1, use_beam_search=True, n=3, logprobs=20, stop_token_ids=[2, 9], ignore_eos=True),
        entering(2, n=2, best_of=3),
        entering(3, n=2, best_of=3, logprobs=1),
        entering(4, n=2),
        entering(5, use_beam_search=True, n=120),
    )
    batch = batch_of(table, [0, 1, 2, 3, 4, 5], [3] * 6)
    assert batch.logprobs.host_rows == [0, 1, 2, 3, 5]
    assert batch.logprobs.num_top == [4 + 1, 20, 0, 1, VOCAB], "a beam must find one that goes on for every beam"
    assert batch_of(table, [0, 1, 5], [3] * 3).draw is None


def test_rows_that_were_never_set_are_greedy():
    batch = batch_of(table_of(), [0, 5], [1, 1])
    assert features_of(batch) == set()
    assert batch.draw is None


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"temperature": 0.0}, set()),
        ({"temperature": 1e-6, "top_k": 5, "top_p": 0.5, "min_p": 0.5}, set()),
        ({}, {"draw"}),
        ({"top_k": 5}, {"draw", "cut"}),
        ({"top_p": 0.5}, {"draw", "cut"}),
        ({"min_p": 0.5}, {"draw", "cut"}),
        ({"top_k": -1}, {"draw"}),
        ({"top_p": 1 - 1e-12, "repetition_penalty": 1 + 1e-12, "presence_penalty": 1e-60}, {"draw"}),
        ({"top_p": 1e-60}, {"draw", "cut"}),
        ({"top_k": VOCAB, "top_p": 1.0, "min_p": 0.0}, {"draw"}),
        ({"temperature": 0.0, "repetition_penalty": 1.1}, {"penalties"}),
        ({"temperature": 0.0, "presence_penalty": 0.1}, {"penalties"}),
        ({"temperature": 0.0, "frequency_penalty": -0.1}, {"penalties"}),
        ({"temperature": 0.0, "logit_bias": {3: 1.0}}, {"bias"}),
        ({"temperature": 0.0, "logit_bias": {}}, set()),
        ({"temperature": 0.0, "logit_bias": {VOCAB: 1.0}}, set()),
        ({"temperature": 0.0, "min_tokens": 1}, {"bans"}),
        ({"temperature": 0.0, "min_tokens": 1, "ignore_eos": True}, set()),
        ({"temperature": 0.0, "min_tokens": 1, "ignore_eos": True, "stop_token_ids": [4]}, {"bans"}),
        ({"temperature": 0.0, "min_tokens": 1, "ignore_eos": True, "stop_token_ids": [VOCAB]}, set()),
        ({"temperature": 0.0, "stop_token_ids": [4]}, set()),
        ({"temperature": 0.0, "logprobs": 0}, {"logprobs"}),
        (ALL_FEATURES, {"draw", "cut", "penalties", "bias", "bans", "logprobs"}),
    ],
    ids=lambda value: str(sorted(value)),
)
def test_a_batch_has_the_features_that_its_rows_use(params, expected):
    table = table_of(entering(1, **params), entering(2, **ALL_FEATURES))
    assert features_of(batch_of(table, [1], [3])) == expected
    assert features_of(batch_of(table, [1, 0], [3, 9])) == expected
    assert features_of(batch_of(table, [2, 1], [3, 3])) == features_of(batch_of(table, [2], [3]))
    assert (batch_of(table, [1], [3]).draw is None) == ("draw" not in expected)


@pytest.mark.parametrize("feature", ALL_FEATURES)
def test_simple_rows_use_temperature_at_most(feature):
    table = table_of(
        entering(0, temperature=0.0), entering(1, temperature=0.3), entering(2, **{feature: ALL_FEATURES[feature]})
    )
    for rows, simple in (([0], True), ([1, 0, 7], True), ([2], False), ([1, 2, 0], False)):
        assert table.is_simple(np.array(rows)) == simple
    assert table.is_simple(np.array([], dtype=np.int64))


def test_draw_columns_are_those_of_the_batch():
    table = table_of(
        entering(1, seed=2**62, temperature=0.3), entering(2, seed=3, temperature=0.0), entering(4, seed=4)
    )
    columns = table.draw_columns(np.array([4, 1, 2]))
    draw = batch_of(table, [4, 1, 2], [3, 3, 3]).draw
    for name in ("seeds", "temperature", "noise_scale"):
        assert getattr(columns, name).tolist() == getattr(draw, name).tolist()
    assert columns.noise_scale.tolist() == [1.0, 1.0, 0.0]


def test_rows_are_gathered_in_the_order_of_the_batch():
    table = table_of(
        entering(0, seed=2**63 - 1, temperature=0.5),
        entering(3, seed=5, temperature=2.0, top_k=7),
        entering(4, seed=6, temperature=0.0, frequency_penalty=0.5, num_prompt=2, num_tokens=9),
        entering(6, seed=7, top_p=0.25, logprobs=4, presence_penalty=-1.0, repetition_penalty=1.5),
    )
    batch = batch_of(table, [6, 4, 0, 3], [30, 9, 10, 2**31 - 1])
    assert batch.num_rows == 4
    assert batch.draw.seeds.tolist() == [7, 6, 2**63 - 1, 5]
    assert batch.draw.positions.tolist() == [30, 9, 10, 2**31 - 1]
    assert batch.draw.temperature.tolist() == [1.0, 1.0, 0.5, 2.0]
    assert batch.draw.noise_scale.tolist() == [1.0, 0.0, 1.0, 1.0]
    assert batch.cut.rows.tolist() == [0, 3]
    assert batch.cut.top_k.tolist() == [0, 7]
    assert batch.cut.top_p.tolist() == [0.25, 1.0]
    assert batch.penalties.rows.tolist() == [0, 1]
    assert batch.penalties.table_rows.tolist() == [6, 4]
    assert batch.penalties.num_prompt_tokens.tolist() == [3, 2]
    assert batch.penalties.num_tokens.tolist() == [30, 9]
    assert batch.penalties.repetition.tolist() == [1.5, 1.0]
    assert batch.penalties.presence.tolist() == [-1.0, 0.0]
    assert batch.penalties.frequency.tolist() == [0.0, 0.5]
    assert batch.logprobs.rows.tolist() == batch.logprobs.host_rows == [0]
    assert batch.logprobs.num_top == [4]


def test_bias_and_bans_are_listed_entry_by_entry():
    table = table_of(
        entering(1, logit_bias={9: 1.5, 4: -2.0}),
        entering(2, min_tokens=2, stop_token_ids=[7, 2]),
        entering(3, logit_bias={0: 3.0, VOCAB + 5: 1.0}, min_tokens=5),
    )
    batch = batch_of(table, [0, 3, 2, 1], [3, 7, 4, 3])
    biases = zip(batch.bias.rows.tolist(), batch.bias.token_ids.tolist(), batch.bias.values.tolist(), strict=True)
    assert sorted(biases) == [(1, 0, 3.0), (3, 4, -2.0), (3, 9, 1.5)]
    assert sorted(zip(batch.bans.rows.tolist(), batch.bans.token_ids.tolist(), strict=True)) == [(1, 2), (2, 2), (2, 7)]
    assert batch_of(table, [0, 3, 2, 1], [3, 8, 5, 3]).bans is None


def test_output_tokens_count_from_the_prompt_not_from_the_entry():
    """A resumed sequence enters with output: what it has already counts towards min_tokens."""
    table = table_of(entering(0, num_prompt=3, num_tokens=6, min_tokens=4))
    assert batch_of(table, [0], [6]).bans is not None
    assert batch_of(table, [0], [7]).bans is None


def test_setting_and_clearing_leave_nothing_behind():
    table = table_of(entering(0, seed=5, temperature=0.5, **ALL_FEATURES))
    table.clear(0)
    table.check_integrity()
    assert features_of(batch_of(table, [0], [3])) == set()
    table.set(entering(0, seed=5, temperature=0.5, **ALL_FEATURES))
    table.set(entering(0, seed=6, num_prompt=1))
    table.check_integrity()
    batch = batch_of(table, [0], [3])
    assert features_of(batch) == {"draw"}
    fresh = batch_of(table_of(entering(0, seed=6, num_prompt=1)), [0], [3])
    for mine, other in zip(batch.draw, fresh.draw, strict=True):
        assert torch.equal(mine, other)
    table.set(entering(0, temperature=0.0, logprobs=1))
    assert features_of(batch_of(table, [0], [3])) == {"logprobs"}


def test_integrity_check_sees_a_column_out_of_step():
    table = table_of(entering(0, top_k=5), entering(1))
    table._columns["top_k"][1] = 3
    with pytest.raises(AssertionError, match=r"top_k.*\[1\]"):
        table.check_integrity()


class CountCopies(TorchDispatchMode):
    """Counts tensors that are copied to another device or type."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


def test_a_batch_is_one_copy_and_sampling_never_looks_at_values(monkeypatch):
    """On the meta device tensors have no values: operations that wait for one, or whose shape depends on one, fail."""
    # No kernel is chosen for meta tensors, and these references are for CPUs: they may look at values.
    monkeypatch.setattr(ops, "truncate_draws", lambda ids, logits, draw, cut: cut.check(ids, logits, draw))
    monkeypatch.setattr(ops, "penalise", lambda logits, table, penalties: penalties.check(logits, table))
    table = table_of(
        *(entering(row, seed=row, **ALL_FEATURES) for row in range(4)), entering(4), entering(5, top_p=0.5)
    )
    for rows in ([0, 1, 2, 3], [0, 1, 4, 5], [4, 4], [6, 6]):
        with CountCopies() as copies:
            batch = batch_of(table, rows, [5] * len(rows), "meta")
        assert copies.count == 1
        logits, table_of_tokens = torch.zeros(len(rows), VOCAB, device="meta"), torch.zeros(8, 20, dtype=torch.int32)
        with dispatch.forced(triton=False):
            output = sample(logits, batch, table_of_tokens.to("meta"))
        assert output.token_ids.shape == (len(rows),)
        assert output.token_ids.dtype == torch.int64
        assert (output.logprobs is None) == (0 not in rows)
        if output.logprobs is not None:
            asking = len([row for row in rows if row < 4])
            assert output.logprobs.top_ids.shape == output.logprobs.top_logprobs.shape == (asking, 2)
