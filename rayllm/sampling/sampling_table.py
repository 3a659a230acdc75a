"""`SamplingTable`: the sampling parameters of every row of the persistent batch, as numpy columns.

`set` does per-request work once, when a sequence enters its row; `batch`, once a step, is a few gathers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch

from rayllm.api.sampling_params import SamplingParams
from rayllm.api.types import SequenceData
from rayllm.sampling.sampling_batch import (
    BanEntries,
    BiasEntries,
    CutRows,
    DrawRows,
    LogprobRows,
    PenaltyRows,
    SamplingBatch,
)
from rayllm.sampling.transfer import to_device

# A column of the table -> what it holds in a row that is plain greedy, a float32 or an int64.
_NEUTRAL: dict[str, float | int] = {
    "features": 0,
    "seed": 0,
    "num_prompt_tokens": 0,
    "temperature": 1.0,
    "noise_scale": 0.0,  # 1 in drawn rows
    "top_k": 0,  # all
    "top_p": 1.0,
    "log_min_p": -math.inf,
    "repetition": 1.0,
    "presence": 0.0,
    "frequency": 0.0,
    "num_biases": 0,
    "min_tokens": 0,
    "num_top_logprobs": -1,  # no log-probabilities
}
# Bits of a row's features. A row without any is plain greedy.
_DRAWN, _CUT, _PENALTY, _BIAS, _MIN_TOKENS, _LOGPROBS = 1, 2, 4, 8, 16, 32
# A row has a feature if one of these columns is not neutral; they are in the order of `CutRows` and `PenaltyRows`.
_COLUMNS_OF = {
    _DRAWN: ("noise_scale",),
    _CUT: ("top_k", "top_p", "log_min_p"),
    _PENALTY: ("repetition", "presence", "frequency"),
    _BIAS: ("num_biases",),
    _MIN_TOKENS: ("min_tokens",),
    _LOGPROBS: ("num_top_logprobs",),
}

_LEAST_REPETITION = 1e-30  # 1e-60 is 0 in float32, and a banned token's -inf * 0 is NaN
_NO_IDS = np.empty(0, dtype=np.int64)


class DrawColumns(NamedTuple):
    """How n rows are drawn if only temperature is used. seeds: [n] int64. temperature, noise_scale: [n] float32."""

    seeds: np.ndarray
    temperature: np.ndarray
    noise_scale: np.ndarray


class SamplingTable:
    """Owns the host columns; rows that are not set are greedy. Not thread-safe.

    max_num_seqs: rows. vocab_size: ids that can be drawn. eos_token_ids: what min_tokens keeps from ending a sequence.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._vocab_size, self._eos_token_ids = vocab_size, list(eos_token_ids)
        self._columns: dict[str, np.ndarray] = {
            name: np.full(max_num_seqs, value, np.float32 if isinstance(value, float) else np.int64)
            for name, value in _NEUTRAL.items()
        }
        # Of rows with these features.
        self._bias_ids = [_NO_IDS] * max_num_seqs
        self._bias_values = [np.empty(0, dtype=np.float32)] * max_num_seqs
        self._ending_ids = [_NO_IDS] * max_num_seqs  # banned until min_tokens

    def set(self, data: SequenceData) -> None:
        """Take the parameters of a sequence that enters row data.row, in place of what was there."""
        row, params, vocab_size = data.row, data.params, self._vocab_size
        # Ids that the model does not have cannot be drawn: nothing to bias, nothing to ban.
        bias = {i: value for i, value in (params.logit_bias or {}).items() if i < vocab_size}
        ending = set(params.stop_token_ids).union(() if params.ignore_eos else self._eos_token_ids)
        ending = {i for i in ending if i < vocab_size}
        values: dict[str, float] = {
            "seed": data.seed,
            "num_prompt_tokens": data.num_prompt_tokens,
            "repetition": max(params.repetition_penalty, _LEAST_REPETITION),
            "presence": params.presence_penalty,
            "frequency": params.frequency_penalty,
            "num_biases": len(bias),
            "min_tokens": params.min_tokens if ending else 0,
            "num_top_logprobs": min(_num_top(params, len(ending)), vocab_size),
        }
        if not params.greedy:
            values |= {
                "temperature": params.temperature,
                "noise_scale": 1.0,
                "top_k": params.top_k if 0 < params.top_k < vocab_size else 0,
                "top_p": params.top_p,
                "log_min_p": math.log(params.min_p) if params.min_p > 0.0 else -math.inf,
            }
        self.clear(row)
        for name, value in values.items():
            self._columns[name][row] = value
        for bit, names in _COLUMNS_OF.items():
            # The columns are asked, not the parameters: what float32 rounds to neutral is neutral.
            if any(self._columns[name][row] != _NEUTRAL[name] for name in names):
                self._columns["features"][row] |= bit
        if bias:
            self._bias_ids[row] = np.fromiter(bias.keys(), dtype=np.int64)
            self._bias_values[row] = np.fromiter(bias.values(), dtype=np.float32)
        if params.min_tokens:
            self._ending_ids[row] = np.array(sorted(ending), dtype=np.int64)

    def clear(self, row: int) -> None:
        """Make a row plain greedy again."""
        for name, value in _NEUTRAL.items():
            self._columns[name][row] = value

    def is_simple(self, rows: np.ndarray) -> bool:
        """True if these rows are greedy or drawn by temperature alone, and report no log-probabilities."""
        return not int(np.bitwise_or.reduce(self._columns["features"][rows], initial=0)) & ~_DRAWN

    def draw_columns(self, rows: np.ndarray) -> DrawColumns:
        """What drawing these rows by temperature takes; neutral values in greedy rows."""
        columns = self._columns
        return DrawColumns(columns["seed"][rows], columns["temperature"][rows], columns["noise_scale"][rows])

    def batch(self, rows: np.ndarray, positions: np.ndarray, device: torch.device | str) -> SamplingBatch:
        """What sampling the next token of these rows takes, on `device`.

        rows: [N] integers, rows of the table; the batch's order is the logits'. positions: [N] integers, the index
        that the sampled token will have in its sequence, which is the number of its tokens so far.
        """
        columns, features = self._columns, self._columns["features"][rows]
        used = int(np.bitwise_or.reduce(features, initial=0))
        # Field of the batch -> its class and the fields of that, in order.
        parts: dict[str, tuple[Callable[..., object], list[np.ndarray]]] = {}

        def users(feature: int) -> tuple[np.ndarray, np.ndarray]:
            """Which of the batch's rows use it, and which of the table's."""
            index = np.flatnonzero(features & feature)
            return index, rows[index]

        if used & _DRAWN:
            seeds, temperature, noise_scale = self.draw_columns(rows)
            parts["draw"] = DrawRows, [seeds, positions, temperature, noise_scale]
        if used & _CUT:
            index, own = users(_CUT)
            parts["cut"] = CutRows, [index, *(columns[name][own] for name in _COLUMNS_OF[_CUT])]
        if used & _PENALTY:
            index, own = users(_PENALTY)
            factors = [columns[name][own] for name in _COLUMNS_OF[_PENALTY]]
            parts["penalties"] = (
                PenaltyRows,
                [index, own, columns["num_prompt_tokens"][own], positions[index], *factors],
            )
        if used & _BIAS:
            index, own = users(_BIAS)
            values = np.concatenate([self._bias_values[row] for row in own])
            parts["bias"] = BiasEntries, [*_entries(index, [self._bias_ids[row] for row in own]), values]
        if used & _MIN_TOKENS:
            index = np.flatnonzero(positions - columns["num_prompt_tokens"][rows] < columns["min_tokens"][rows])
            if len(index):
                parts["bans"] = BanEntries, [*_entries(index, [self._ending_ids[row] for row in rows[index]])]
        if used & _LOGPROBS:
            index, own = users(_LOGPROBS)
            num_top = columns["num_top_logprobs"][own].tolist()
            parts["logprobs"] = partial(LogprobRows, index.tolist(), num_top), [index]

        views = iter(to_device([array for _, arrays in parts.values() for array in arrays], torch.device(device)))
        fields: dict[str, Any] = {name: kind(*islice(views, len(arrays))) for name, (kind, arrays) in parts.items()}
        return SamplingBatch(len(rows), **fields)

    def check_integrity(self) -> None:
        """Raise AssertionError unless each row's features say what its columns hold."""
        columns = self._columns
        for bit, names in _COLUMNS_OF.items():
            expected = np.any([columns[name] != _NEUTRAL[name] for name in names], axis=0)
            wrong = np.flatnonzero((columns["features"] & bit != 0) != expected)
            assert not len(wrong), f"{', '.join(names)}: feature bit and columns disagree in rows {wrong.tolist()}"
        greedy = columns["features"] & _DRAWN == 0
        assert not np.any(columns["features"][greedy] & _CUT), "a greedy row is cut"
        assert np.all(columns["temperature"][greedy] == 1), "a greedy row has a temperature"
        assert np.all((columns["temperature"] > 0) & (columns["seed"] >= 0)), "a parameter is out of range"


def _num_top(params: SamplingParams, num_ending: int) -> int:
    """Top tokens to report; -1 for no log-probabilities at all. num_ending: tokens that end a sequence.

    A beam needs as many tokens as there are beams, and they must not be among those that end it. The most likely of
    several samples are found by their log-probabilities.
    """
    if params.use_beam_search:
        return max(params.logprobs or 0, params.width + num_ending)
    if params.logprobs is None:
        return 0 if params.width > params.n else -1
    return params.logprobs


def _entries(index: np.ndarray, ids: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(batch rows, token ids) of all pairs, [E] int64 each. index: [rows] batch rows. ids: the token ids of each."""
    return np.repeat(index, [len(row_ids) for row_ids in ids]), np.concatenate(ids)
