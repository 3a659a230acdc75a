"""`SamplingTable`: the sampling parameters of every row of the persistent batch, as numpy columns.

`set` does per-request work once, when a sequence enters its row; `batch`, once a step, is a few gathers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

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
    Packer,
    PenaltyRows,
    SamplingBatch,
)

# Bits of a row's features. A row without any is plain greedy.
_DRAWN = 1
_TOP_K = 2
_TOP_P = 4
_MIN_P = 8
_PENALTY = 16
_BIAS = 32
_MIN_TOKENS = 64
_LOGPROBS = 128
_CUT = _TOP_K | _TOP_P | _MIN_P

_LEAST_REPETITION = 1e-30  # 1e-60 is 0 in float32, and a banned token's -inf * 0 is NaN

_NO_IDS = np.empty(0, dtype=np.int64)
_NO_VALUES = np.empty(0, dtype=np.float32)


class DrawColumns(NamedTuple):
    """How n rows are drawn if only temperature is used. seeds: [n] int64. temperature, noise_scale: [n] float32."""

    seeds: np.ndarray
    temperature: np.ndarray
    noise_scale: np.ndarray

    @classmethod
    def empty(cls) -> DrawColumns:
        """Of no rows."""
        return cls(np.zeros(0, np.int64), np.zeros(0, np.float32), np.zeros(0, np.float32))


class SamplingTable:
    """Owns the host columns; rows that are not set are greedy. Not thread-safe.

    max_num_seqs: rows. vocab_size: ids that can be drawn. eos_token_ids: what min_tokens keeps from ending a sequence.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._features = np.zeros(max_num_seqs, dtype=np.int64)
        self._seed = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_prompt_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self._min_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_top_logprobs = np.zeros(max_num_seqs, dtype=np.int64)
        self._top_k = np.zeros(max_num_seqs, dtype=np.int64)  # 0: all
        self._top_p = np.ones(max_num_seqs, dtype=np.float32)
        self._log_min_p = np.full(max_num_seqs, -np.inf, dtype=np.float32)
        self._temperature = np.ones(max_num_seqs, dtype=np.float32)  # 1 in greedy rows
        self._noise_scale = np.zeros(max_num_seqs, dtype=np.float32)  # 0 in greedy rows
        self._repetition = np.ones(max_num_seqs, dtype=np.float32)
        self._presence = np.zeros(max_num_seqs, dtype=np.float32)
        self._frequency = np.zeros(max_num_seqs, dtype=np.float32)
        self._bias_ids = [_NO_IDS] * max_num_seqs
        self._bias_values = [_NO_VALUES] * max_num_seqs
        self._ending_ids = [_NO_IDS] * max_num_seqs  # banned until min_tokens

    def set(self, data: SequenceData) -> None:
        """Take the parameters of a sequence that enters row data.row, in place of what was there."""
        row, params = data.row, data.params
        self.clear(row)
        self._seed[row] = data.seed
        self._num_prompt_tokens[row] = data.num_prompt_tokens
        features = 0 if params.greedy else self._set_draw(data)
        self._repetition[row] = max(params.repetition_penalty, _LEAST_REPETITION)
        self._presence[row] = params.presence_penalty
        self._frequency[row] = params.frequency_penalty
        # The columns are asked, not the parameters: what float32 rounds to neutral is neutral.
        if self._repetition[row] != 1.0 or self._presence[row] != 0.0 or self._frequency[row] != 0.0:
            features |= _PENALTY
        # Ids that the model does not have cannot be drawn: nothing to bias, nothing to ban.
        if bias := {i: v for i, v in (params.logit_bias or {}).items() if i < self._vocab_size}:
            features |= _BIAS
            self._bias_ids[row] = np.fromiter(bias.keys(), dtype=np.int64)
            self._bias_values[row] = np.fromiter(bias.values(), dtype=np.float32)
        ending = set(params.stop_token_ids).union(() if params.ignore_eos else self._eos_token_ids)
        ending = {i for i in ending if i < self._vocab_size}
        if params.min_tokens > 0 and ending:
            features |= _MIN_TOKENS
            self._min_tokens[row] = params.min_tokens
            self._ending_ids[row] = np.array(sorted(ending), dtype=np.int64)
        if (num_top := _num_top(params, len(ending))) is not None:
            features |= _LOGPROBS
            self._num_top_logprobs[row] = min(num_top, self._vocab_size)
        self._features[row] = features

    def _set_draw(self, data: SequenceData) -> int:
        """Set what only drawn rows have; greedy rows keep the neutral values. Returns the features."""
        row, params = data.row, data.params
        features = _DRAWN
        self._temperature[row] = params.temperature
        self._noise_scale[row] = 1.0
        if 0 < params.top_k < self._vocab_size:
            features |= _TOP_K
            self._top_k[row] = params.top_k
        self._top_p[row] = params.top_p
        if self._top_p[row] < 1.0:
            features |= _TOP_P
        if params.min_p > 0.0:
            features |= _MIN_P
            self._log_min_p[row] = math.log(params.min_p)
        return features

    def clear(self, row: int) -> None:
        """Make a row plain greedy again."""
        self._features[row] = self._seed[row] = self._num_prompt_tokens[row] = 0
        self._min_tokens[row] = self._num_top_logprobs[row] = self._top_k[row] = 0
        self._top_p[row] = self._temperature[row] = self._repetition[row] = 1.0
        self._noise_scale[row] = self._presence[row] = self._frequency[row] = 0.0
        self._log_min_p[row] = -np.inf
        self._bias_ids[row] = self._ending_ids[row] = _NO_IDS
        self._bias_values[row] = _NO_VALUES

    def is_simple(self, rows: np.ndarray) -> bool:
        """True if these rows are greedy or drawn by temperature alone, and report no log-probabilities."""
        return not int(np.bitwise_or.reduce(self._features[rows], initial=0)) & ~_DRAWN

    def draw_columns(self, rows: np.ndarray) -> DrawColumns:
        """What drawing these rows by temperature takes; neutral values in greedy rows."""
        return DrawColumns(self._seed[rows], self._temperature[rows], self._noise_scale[rows])

    def batch(self, rows: np.ndarray, positions: np.ndarray, device: torch.device | str) -> SamplingBatch:
        """What sampling the next token of these rows takes, on `device`.

        rows: [N] integers, rows of the table; the batch's order is the logits'. positions: [N] integers, the index
        that the sampled token will have in its sequence, which is the number of its tokens so far.
        """
        packer = Packer()
        features = self._features[rows]
        used = int(np.bitwise_or.reduce(features, initial=0))
        draw = cut = penalties = bias = bans = logprobs = None
        if used & _DRAWN:
            counters = np.stack((self._seed[rows], positions))
            draw = packer.add(counters, np.stack((self._temperature[rows], self._noise_scale[rows])))
        if used & _CUT:
            cut = self._add_cut(packer, rows, features)
        if used & _PENALTY:
            penalties = self._add_penalties(packer, rows, features, positions)
        if used & _BIAS:
            bias = self._add_bias(packer, rows, features)
        if used & _MIN_TOKENS:
            bans = self._add_bans(packer, rows, positions)
        if used & _LOGPROBS:
            asking = np.flatnonzero(features & _LOGPROBS)
            num_top = self._num_top_logprobs[rows[asking]].tolist()
            logprobs = packer.add(asking[None])

        views = packer.copy(torch.device(device))

        def tensors(where: slice) -> list[torch.Tensor]:
            return [view for array in views[where] for view in array]

        return SamplingBatch(
            num_rows=len(rows),
            draw=DrawRows(*tensors(draw)) if draw else None,
            cut=CutRows(*tensors(cut)) if cut else None,
            penalties=PenaltyRows(*tensors(penalties)) if penalties else None,
            bias=BiasEntries(*tensors(bias)) if bias else None,
            bans=BanEntries(*tensors(bans)) if bans else None,
            logprobs=LogprobRows(asking.tolist(), num_top, *tensors(logprobs)) if logprobs else None,
        )

    def _add_cut(self, packer: Packer, rows: np.ndarray, features: np.ndarray) -> slice:
        """Pack CutRows."""
        index = np.flatnonzero(features & _CUT)
        cut_rows = rows[index]
        floats = np.stack((self._top_p[cut_rows], self._log_min_p[cut_rows]))
        return packer.add(np.stack((index, self._top_k[cut_rows])), floats)

    def _add_penalties(self, packer: Packer, rows: np.ndarray, features: np.ndarray, positions: np.ndarray) -> slice:
        """Pack PenaltyRows."""
        index = np.flatnonzero(features & _PENALTY)
        table_rows = rows[index]
        integers = np.stack((index, table_rows, self._num_prompt_tokens[table_rows], positions[index])).astype(np.int64)
        floats = np.stack((self._repetition[table_rows], self._presence[table_rows], self._frequency[table_rows]))
        return packer.add(integers, floats)

    def _add_bias(self, packer: Packer, rows: np.ndarray, features: np.ndarray) -> slice:
        """Pack BiasEntries."""
        index = np.flatnonzero(features & _BIAS)
        values = [self._bias_values[row] for row in rows[index]]
        return packer.add(_entries(index, [self._bias_ids[row] for row in rows[index]]), np.concatenate(values)[None])

    def _add_bans(self, packer: Packer, rows: np.ndarray, positions: np.ndarray) -> slice | None:
        """Pack BanEntries for the rows that are still short of their min_tokens, if there are any."""
        index = np.flatnonzero(positions - self._num_prompt_tokens[rows] < self._min_tokens[rows])
        if not len(index):
            return None
        return packer.add(_entries(index, [self._ending_ids[row] for row in rows[index]]))

    def check_integrity(self) -> None:
        """Raise AssertionError unless each row's features say what its columns hold."""
        has_bias = np.array([len(ids) > 0 for ids in self._bias_ids], dtype=bool)
        has_ending = np.array([len(ids) > 0 for ids in self._ending_ids], dtype=bool)
        penalised = (self._repetition != 1) | (self._presence != 0) | (self._frequency != 0)
        for name, bit, expected in (
            ("draw", _DRAWN, self._noise_scale == 1),
            ("top_k", _TOP_K, self._top_k > 0),
            ("top_p", _TOP_P, self._top_p < 1),
            ("min_p", _MIN_P, self._log_min_p > -np.inf),
            ("penalties", _PENALTY, penalised),
            ("bias", _BIAS, has_bias),
            ("min_tokens", _MIN_TOKENS, has_ending & (self._min_tokens > 0)),
        ):
            wrong = np.flatnonzero((self._features & bit != 0) != expected)
            assert not len(wrong), f"{name}: feature bit and column disagree in rows {wrong.tolist()}"
        greedy = self._features & _DRAWN == 0
        assert not np.any(greedy & (self._features & _CUT != 0)), "a greedy row is cut"
        assert np.all(self._temperature[greedy] == 1), "a greedy row has a temperature"
        assert np.all((self._temperature > 0) & (self._top_p >= 0) & (self._seed >= 0)), "a parameter is out of range"
        lengths = zip(self._bias_ids, self._bias_values, strict=True)
        assert all(len(ids) == len(values) for ids, values in lengths), "biases without ids"


def _num_top(params: SamplingParams, num_ending: int) -> int | None:
    """Top tokens to report; None for no log-probabilities at all. num_ending: tokens that end a sequence.

    A beam needs as many tokens as there are beams, and they must not be among those that end it. The most likely of
    several samples are found by their log-probabilities.
    """
    if params.use_beam_search:
        return max(params.logprobs or 0, params.width + num_ending)
    if params.logprobs is None and params.width > params.n:
        return 0
    return params.logprobs


def _entries(index: np.ndarray, ids: list[np.ndarray]) -> np.ndarray:
    """(batch row, token id) pairs: [2, E] int64. index: [rows] batch rows. ids: the token ids of each."""
    return np.stack((np.repeat(index, [len(row_ids) for row_ids in ids]), np.concatenate(ids)))
