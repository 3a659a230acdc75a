"""`StepTimes`: how long a step of given work takes, learned from the steps so far.

    seconds = a + b * decodes + c * (cost, or else prompt tokens) + d * (query, key) pairs of the prompts' attention

fitted by least squares to the relative error, with old steps forgotten, and with all coefficients at least zero. Steps
with and without prompts are forgotten separately, so that a long time without prompts does not make the fit forget what
those cost. What was measured when the engine started is never forgotten, since a long prompt can teach about one size
of step for a hundred steps; it counts little, and as if the device had been then as fast as it is of late. On top of
the fit comes a factor by which the last steps with prompts took longer than it says: it follows a device that slows
down faster than a fit over many steps can.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

FORGET = 0.97  # of a step's weight is left after the next step of its kind
FORGET_FACTOR = 0.8
FORGET_ERROR = 0.95
FORGET_SPEED = 0.9
START_WEIGHT = 0.1  # of a measurement at the start, against the last step's 1
RIDGE = 1e-6  # of the normal equations' diagonal, for steps that are all alike
OUTLIER = 3.0  # a step that takes longer than so many times what was expected says nothing beyond that
FIRST_ERROR = 0.1


class StepWork(NamedTuple):
    """What a step computes."""

    # Sequences that decode.
    decodes: int
    # Tokens of chunks, with what the step is padded by.
    prompt_tokens: int
    # Keys that the chunks' tokens attend to, summed over the tokens; of a captured step in pairs of the largest one.
    pairs: float
    # What all its tokens took when the engine started, in tokens of the largest captured step; 0 if not known.
    cost: float = 0.0


def attended(start: int, count: int, window: int | None) -> int:
    """Keys that `count` tokens from position `start` on attend to, themselves included, summed over the tokens."""
    ramp = count if window is None else min(count, max(0, window - 1 - start))  # these see all tokens before them
    pairs = ramp * start + ramp * (ramp + 1) // 2
    return pairs if window is None else pairs + (count - ramp) * window


class StepTimes:
    """Predicts steps. measurements: (work, seconds) of steps with prompts, taken when the engine started."""

    def __init__(self, measurements: Iterable[tuple[StepWork, float]] = ()):
        # Prompt tokens of the largest step, forgotten as the rest is; predictions far beyond it are guesses.
        self.most_tokens = 0.0
        self._with_prompts, self._without_prompts, self._start = _Sums(), _Sums(), _Sums()
        for work, seconds in measurements:
            self._start.add(_features(work), seconds, forget=1.0)
        self._start_coefficients = _solve(self._start.rows) if self._start.count else None
        self._coefficients: list[float] | None = None  # of all steps; None if one came since they were computed
        self._slowdown = 1.0  # what late steps take, over what they would have taken at the start
        self._factor = 1.0  # what the last steps with prompts took, over what the fit says of them
        self._variance = FIRST_ERROR**2

    @property
    def error(self) -> float:
        """Of late predictions for steps with prompts and decodes: relative, as a standard deviation."""
        return math.sqrt(self._variance)

    def observe(self, work: StepWork, seconds: float) -> None:
        """A step of this work took so long."""
        if seconds <= 0:
            return  # a clock that stands still teaches nothing
        if self._start_coefficients is not None:
            if not work.prompt_tokens:
                return  # it has no cost, and says little about steps that have one
            then = _times(self._start_coefficients, _features(work))
            if then > 0:
                late = min(seconds / then, OUTLIER * self._slowdown)
                self._slowdown = FORGET_SPEED * self._slowdown + (1 - FORGET_SPEED) * late
        sums = self._with_prompts if work.prompt_tokens else self._without_prompts
        if sums.count > 3:
            expected = self._fit(work)
            if expected > 0:
                seconds = min(seconds, OUTLIER * expected * max(1.0, self._factor))
                if work.prompt_tokens and work.decodes:
                    self._compare(seconds / expected)
        sums.add(_features(work), seconds)
        self._coefficients = None
        if work.prompt_tokens:
            self.most_tokens = max(work.prompt_tokens, FORGET * self.most_tokens)

    def predict(self, work: StepWork) -> float:
        """Seconds; 0 as long as nothing is known."""
        return self._fit(work) * self._factor

    def _compare(self, ratio: float) -> None:
        """Learn from what a step took over what the fit alone says of it."""
        error = ratio / self._factor - 1
        square = min(error * error, 9 * self._variance)
        self._variance = FORGET_ERROR * self._variance + (1 - FORGET_ERROR) * square
        self._factor = FORGET_FACTOR * self._factor + (1 - FORGET_FACTOR) * ratio

    def _fit(self, work: StepWork) -> float:
        if self._coefficients is None:
            start = self._start.scaled(START_WEIGHT, self._slowdown)
            self._coefficients = _solve(self._without_prompts.plus(self._with_prompts).plus(start).rows)
        return _times(self._coefficients, _features(work))


def _features(work: StepWork) -> tuple[float, float, float, float]:
    """Scaled to the same magnitude, so that the normal equations are well-conditioned."""
    return 1.0, work.decodes / 64, (work.cost or work.prompt_tokens) / 1024, work.pairs / 2**22


def _times(coefficients: list[float], features: tuple[float, ...]) -> float:
    return sum(c * x for c, x in zip(coefficients, features, strict=True))


class _Sums:
    """The normal equations of steps: sums of x x' / t^2 and x / t, where t is a step's time."""

    def __init__(self) -> None:
        self.rows = [[0.0] * 5 for _ in range(4)]  # the right side is the last column
        self.count = 0.0

    def add(self, x: tuple[float, ...], seconds: float, forget: float = FORGET) -> None:
        scaled = [value / seconds for value in x]
        for row, value in zip(self.rows, scaled, strict=True):
            for j, other in enumerate((*scaled, 1.0)):
                row[j] = forget * row[j] + value * other
        self.count = forget * self.count + 1

    def plus(self, other: _Sums) -> _Sums:
        both = _Sums()
        both.rows = [[a + b for a, b in zip(r, s, strict=True)] for r, s in zip(self.rows, other.rows, strict=True)]
        return both

    def scaled(self, weight: float, slowdown: float) -> _Sums:
        """Of the same steps, counted with this weight, had they taken `slowdown` times as long."""
        scaled = _Sums()
        scaled.rows = [[weight * a / slowdown**2 for a in row[:4]] + [weight * row[4] / slowdown] for row in self.rows]
        return scaled


def _solve(rows: list[list[float]]) -> list[float]:
    """The least squares' coefficients, none below zero: while one is, the lowest is left out."""
    used = [i for i in range(4) if rows[i][i] > 0]
    while used:
        solved = _eliminate([[rows[i][j] for j in used] + [rows[i][4]] for i in used])
        least = min(range(len(used)), key=solved.__getitem__)
        if solved[least] >= 0:
            coefficients = [0.0] * 4
            for i, value in zip(used, solved, strict=True):
                coefficients[i] = value
            return coefficients
        del used[least]
    return [0.0] * 4


def _eliminate(matrix: list[list[float]]) -> list[float]:
    """Solve symmetric positive semidefinite equations, the right side in the last column, by Gaussian elimination."""
    size = len(matrix)
    for i in range(size):
        matrix[i][i] *= 1 + RIDGE
    for i in range(size):
        pivot = matrix[i][i] or 1.0
        for k in range(i + 1, size):
            share = matrix[k][i] / pivot
            for j in range(i, size + 1):
                matrix[k][j] -= share * matrix[i][j]
    solved = [0.0] * size
    for i in reversed(range(size)):
        rest = matrix[i][size] - sum(matrix[i][j] * solved[j] for j in range(i + 1, size))
        solved[i] = rest / (matrix[i][i] or 1.0)
    return solved
