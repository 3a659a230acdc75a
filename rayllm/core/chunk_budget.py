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
without a pause, and that is what streams see.
"""

from __future__ import annotations

import bisect

from rayllm.api.types import StepCost
from rayllm.core.sequence import Sequence
from rayllm.core.step_time import StepTimes, StepWork, attended

MIN_CHUNK = 64  # prompt tokens that a step computes in any case
GROWTH = (
    2  # a step may have this many times the prompt tokens of the largest step seen; beyond, predictions are guesses
)
MARGIN = 3.0  # standard deviations of the prediction's error that are kept free
LEAST_ERROR = 0.01  # the error is taken for at least this, relative
SPARE_TOKENS = 8  # left free in a captured step for sequences of one token that enter once it is filled
AS_FAST = 0.98  # sizes within this share of the highest rate count as equally fast; the largest of them is taken
SHORTEST = 1e-9  # seconds; stands for the time of a step of which nothing is known


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
        least, most = captured, max(captured, self._most - self._tokens)
        while least < most:
            middle = (least + most + 1) // 2
            if self._predict(start, middle) <= self._seconds:
                least = middle
            else:
                most = middle - 1
        return least if least > captured else 0

    def _predict(self, start: int, count: int) -> float:
        """Seconds of the step if it is granted so many more tokens."""
        pairs = self._pairs + attended(start, count, self._budget.window)
        work = self._budget.captured.work(self._decodes, self._tokens + count, pairs)
        return self._budget.times.predict(work)


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
