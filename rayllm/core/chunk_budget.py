"""`ChunkBudget`: as much of the prompts a step as decoding streams can bear, for a target inter-token latency.

While sequences decode, a step should take no longer than the target, because each of them gets one token from it. What
the decodes leave of that time, as `StepTimes` predicts it and less a margin for its errors, goes to chunks of prompts:
the later a chunk begins in its prompt, the more keys it attends to, and the shorter it has to be. At least `MIN_CHUNK`
tokens are computed in any case, so prompts make progress even if the decodes alone take longer than the target. A step
without decodes keeps nobody waiting and takes all it can.

Captured steps are padded to fixed sizes, and their times do not grow evenly with the size: matrix products and
attention compute whole tiles, and tiles come in waves over the multiprocessors. So among the captured sizes that are
predicted to be short enough, the one that computes the most prompt tokens a second is taken, and filled.

A step's time is that between its result and the one before: with a step in flight behind it, the device computes
without a pause, and that is what streams see. It is learned from the steps so far:

    seconds = a + b * decodes + c * (cost, or else prompt tokens) + d * (query, key) pairs of the prompts' attention

fitted by least squares to the relative error, with old steps forgotten, and with all coefficients at least zero. Steps
with and without prompts are forgotten separately, so that a long time without prompts does not make the fit forget what
those cost. What was measured when the engine started is never forgotten, since a long prompt can teach about one size
of step for a hundred steps; it counts little, and as if the device had been then as fast as it is of late. On top of
the fit comes a factor by which the last steps with prompts took longer than it says: it follows a device that slows
down faster than a fit over many steps can.
"""

from __future__ import annotations

import bisect
import math
import operator
import sys
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from rayllm.api.types import StepCost
from rayllm.core.sequence import Sequence

MIN_CHUNK = 64  # prompt tokens that a step computes in any case
GROWTH = 2  # a step may have so many times the prompt tokens of the largest step seen; beyond, predictions are guesses
MARGIN = 3.0  # standard deviations of the prediction's error that are kept free
LEAST_ERROR = 0.01  # the error is taken for at least this, relative
SPARE_TOKENS = 8  # left free in a captured step for sequences of one token that enter once it is filled
AS_FAST = 0.98  # sizes within this share of the highest rate count as equally fast; the largest of them is taken
SHORTEST = 1e-9  # seconds; stands for the time of a step of which nothing is known
FORGET = 0.97  # of a step's weight is left after the next step of its kind
FORGET_FACTOR = 0.8
FORGET_ERROR = 0.95
FORGET_SPEED = 0.9
START_WEIGHT = 0.1  # of a measurement at the start, against the last step's 1
RIDGE = 1e-6  # of the normal equations' diagonal, for steps that are all alike
_RIDGED = 1 + RIDGE * np.eye(4)
OUTLIER = 3.0  # a step that takes longer than so many times what was expected says nothing beyond that
FIRST_ERROR = 0.1


class StepChunks:
    """How many prompt tokens one step may compute beside its decodes, of which there is at least one."""

    def __init__(self, budget: ChunkBudget, decodes: int):
        self._budget = budget
        self._most = budget.most_tokens()
        self._seconds = budget.seconds()
        self._decodes = decodes
        self._tokens = self._pairs = 0  # of the chunks granted so far

    def grant(self, start: int, count: int) -> int:
        """How many of `count` tokens from position `start` on to compute in this step; 0 if its time is used up."""
        wanted = max(self._fill_captured(start, count), self._beyond_captured(start), MIN_CHUNK - self._tokens, 0)
        if not self._tokens:
            self._budget.limit = wanted
        count = min(count, wanted)
        self._tokens += count
        self._pairs += attended(start, count, self._budget.window)
        return count

    def _fill_captured(self, start: int, count: int) -> int:
        """Tokens that fill the fastest captured step, by prompt tokens a second, of those that are short enough.

        Tokens beyond `count`, which there may not be, count neither as computed nor as time.
        """
        best, highest = 0, 0.0
        if self._tokens:
            highest = self._tokens / max(self._predict(start, 0), SHORTEST)
        for size in self._budget.captured.sizes:
            more = size - SPARE_TOKENS - self._decodes - self._tokens
            if more <= 0:
                continue
            seconds = self._predict(start, min(more, count))
            rate = (self._tokens + min(more, count)) / max(seconds, SHORTEST)
            if seconds <= self._seconds and rate >= AS_FAST * highest:
                best, highest = more, max(rate, highest)
            if more >= count:
                break
        return best

    def _beyond_captured(self, start: int) -> int:
        """The most tokens that are short enough and more than the captured steps have; 0 if there are none."""
        captured = max(0, self._budget.captured.largest - self._decodes - self._tokens)
        counts = range(captured + 1, self._most - self._tokens + 1)
        fitting = bisect.bisect_right(counts, self._seconds, key=lambda count: self._predict(start, count))
        return counts[fitting - 1] if fitting else 0

    def _predict(self, start: int, count: int) -> float:
        """Seconds of the step if it is granted so many more tokens."""
        pairs = self._pairs + attended(start, count, self._budget.window)
        work = self._budget.captured.work(self._decodes, self._tokens + count, pairs)
        return self._budget.times.predict(work)


class ChunkBudget:
    """Learns how long steps take, and makes a `StepChunks` of it for each step with decodes.

    target: seconds between a stream's tokens. max_tokens: of a step. step_costs, window: as for `CapturedSteps`.
    """

    def __init__(self, target: float, max_tokens: int, window: int | None, step_costs: dict[int, StepCost]):
        self._target, self._max_tokens, self.window = target, max_tokens, window
        self.captured = CapturedSteps(step_costs, window)
        self.times = StepTimes(self.captured.measurements())
        self.limit = 0  # prompt tokens that the last step with both decodes and prompts had time for; 0 before
        self._last_result = 0.0

    def most_tokens(self) -> int:
        """Prompt tokens up to which predictions may be trusted."""
        known = max(self.captured.largest, int(GROWTH * self.times.most_tokens))
        return min(self._max_tokens, max(GROWTH * MIN_CHUNK, known))

    def seconds(self) -> float:
        """What a step may take by its prediction."""
        return self._target / (1 + MARGIN * max(self.times.error, LEAST_ERROR))

    def observe(self, work: StepWork, scheduled_at: float, now: float) -> None:
        """The result of a step is there; it began when it was scheduled, or when the step before was done."""
        self.times.observe(work, now - max(scheduled_at, self._last_result))
        self._last_result = now

    def work_of(self, decodes: int, chunks: list[tuple[Sequence, int]]) -> StepWork:
        """What a step computes. chunks: sequences that are not decoding, with token counts, counted as computed."""
        pairs = sum(attended(seq.num_computed - count, count, self.window) for seq, count in chunks)
        return self.captured.work(decodes, sum(count for _seq, count in chunks), pairs)


# ---------------------------------------------------------------------------------------------------- what steps take


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


class CapturedSteps:
    """What the captured steps take, in proportion to the largest of them.

    costs: as in `RankReady`. window: tokens that the layer that sees most sees; None for all.
    """

    def __init__(self, costs: dict[int, StepCost], window: int | None):
        self.sizes = list(costs)  # ascending
        self.largest = max(costs, default=0)  # 0 without any
        self._costs, self._window = costs, window
        # By size: tokens of the largest step that take as long as all tokens of this one, and pairs that take as long
        # as one pair of this one.
        self._tokens: dict[int, float] = {}
        self._pair: dict[int, float] = {}
        a_pair = {size: max(0.0, cost.chunk - cost.padding) / self._pairs(size) for size, cost in costs.items()}
        for size, cost in costs.items():
            self._tokens[size] = cost.padding / (costs[self.largest].padding / self.largest)
            self._pair[size] = a_pair[size] / a_pair[self.largest] if a_pair[self.largest] else 1.0

    def measurements(self) -> list[tuple[StepWork, float]]:
        """What was measured when the engine started: (work, seconds)."""
        measured = []
        for size, cost in self._costs.items():
            measured.append((self.work(0, size, 0), cost.padding))
            measured.append((self.work(0, size, self._pairs(size)), cost.chunk))
        return measured

    def work(self, decodes: int, prompt_tokens: int, pairs: int) -> StepWork:
        """What a step computes once it is padded. pairs: counted, without padding."""
        size = decodes + prompt_tokens
        if not prompt_tokens or not self.sizes:
            return StepWork(decodes, prompt_tokens, pairs)
        if size > self.largest:
            return StepWork(decodes, prompt_tokens, pairs, float(size))
        size = self.sizes[bisect.bisect_left(self.sizes, size)]
        return StepWork(decodes, size - decodes, pairs * self._pair[size], self._tokens[size])

    def _pairs(self, size: int) -> int:
        """Pairs that were attended to when `StepCost.chunk` was measured."""
        context = self._costs[size].context
        count = min(size, context)
        return attended(context - count, count, self._window)


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
            # The steps at the start count as if they had taken `_slowdown` times as long.
            start = START_WEIGHT * self._start.rows / ([self._slowdown**2] * 4 + [self._slowdown])
            self._coefficients = _solve(self._without_prompts.rows + self._with_prompts.rows + start)
        return _times(self._coefficients, _features(work))


def _features(work: StepWork) -> tuple[float, float, float, float]:
    """Scaled to the same magnitude, so that the normal equations are well-conditioned."""
    return 1.0, work.decodes / 64, (work.cost or work.prompt_tokens) / 1024, work.pairs / 2**22


def _times(coefficients: list[float], features: tuple[float, ...]) -> float:
    return sum(map(operator.mul, coefficients, features))


class _Sums:
    """The normal equations of steps: sums of x x' / t^2 and x / t, where t is a step's time."""

    def __init__(self) -> None:
        self.rows = np.zeros((4, 5))  # the right side is the last column
        self.count = 0.0

    def add(self, x: tuple[float, ...], seconds: float, forget: float = FORGET) -> None:
        scaled = np.array((*x, seconds)) / seconds
        self.rows *= forget
        self.rows += scaled[:4, None] * scaled
        self.count = forget * self.count + 1


def _solve(rows: np.ndarray) -> list[float]:
    """The least squares' coefficients, none below zero: while one is, the lowest is left out."""
    matrix, right, coefficients = rows[:, :4] * _RIDGED, rows[:, 4], [0.0] * 4
    used = [i for i, square in enumerate(matrix.diagonal().tolist()) if square > sys.float_info.min]
    while used:
        solved = np.linalg.solve(matrix[used][:, used], right[used]).tolist()
        least = min(solved)
        if least >= 0:
            for i, value in zip(used, solved, strict=True):
                coefficients[i] = value
            break
        del used[solved.index(least)]
    return coefficients
