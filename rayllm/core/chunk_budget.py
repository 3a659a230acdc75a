"""`ChunkBudget`: as much of the prompts a step as decoding streams can bear, for a target inter-token latency.

While sequences decode, a step should take no longer than the target, because each of them gets one token from it. What
the decodes leave of that time, as `StepTimes` predicts it and less a margin for its errors, goes to chunks of prompts:
the later a chunk begins in its prompt, the more keys it attends to, and the shorter it has to be. At least `MIN_CHUNK`
tokens are computed in any case, so prompts make progress even if the decodes alone take longer than the target. A step
without decodes keeps nobody waiting and takes all it can.

A step's time is that between its result and the one before: with a step in flight behind it, the device computes
without a pause, and that is what streams see.
"""

from __future__ import annotations

import bisect

from rayllm.core.sequence import Sequence
from rayllm.core.step_time import StepTimes, StepWork, attended

MIN_CHUNK = 64
GROWTH = 2  # no more than so many times the prompt tokens of the largest step seen: what lies beyond is a guess
MARGIN = 3.0  # standard deviations of the prediction's error, which is never less than LEAST_ERROR
LEAST_ERROR = 0.01


class Pace:
    """What one step may take for prompts, besides its decodes, of which there is at least one."""

    def __init__(self, budget: ChunkBudget, decodes: int):
        self._budget = budget
        self._most = budget.most_tokens()
        self._seconds = budget.seconds()
        self._decodes = decodes
        self._tokens = self._pairs = 0  # of the chunks so far

    def take(self, start: int, count: int) -> int:
        """How many of `count` tokens from position `start` on to compute, which count as taken; 0 if time is up."""
        least = max(0, MIN_CHUNK - self._tokens)
        most = max(least, self._most - self._tokens)
        while least < most:
            middle = (least + most + 1) // 2
            pairs = self._pairs + attended(start, middle, self._budget.window)
            work = self._budget.work(self._decodes, self._tokens + middle, pairs)
            if self._budget.times.predict(work) <= self._seconds:
                least = middle
            else:
                most = middle - 1
        if not self._tokens:
            self._budget.limit = least
        count = min(count, least)
        self._tokens += count
        self._pairs += attended(start, count, self._budget.window)
        return count


class ChunkBudget:
    """target: seconds between a stream's tokens. max_tokens: of a step. window: as of `KVWindow`.

    step_seconds: as in `RankReady`. What fills a step up to one of the sizes costs nothing, and twice as many tokens
    need not take twice as long.

    limit: prompt tokens that the last step with both decodes and prompts had time for; 0 before.
    """

    def __init__(self, target: float, max_tokens: int, window: int | None, step_seconds: dict[int, float]):
        self._target, self._max_tokens, self.window = target, max_tokens, window
        self._step_sizes, self._step_seconds = list(step_seconds), step_seconds
        self.times = StepTimes()
        for size, seconds in step_seconds.items():
            self.times.begin_with(self.work(0, size, 0), seconds)
        self._last_result = 0.0
        self.limit = 0

    def most_tokens(self) -> int:
        """Prompt tokens up to which predictions may be trusted."""
        return min(self._max_tokens, max(GROWTH * MIN_CHUNK, int(GROWTH * self.times.most_tokens)))

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
        return self.work(decodes, sum(count for _seq, count in chunks), pairs)

    def work(self, decodes: int, prompt_tokens: int, pairs: int) -> StepWork:
        """The same, with the chunks' tokens counted; the step is padded."""
        if not prompt_tokens or not self._step_sizes:
            return StepWork(decodes, prompt_tokens, pairs)
        largest = self._step_sizes[-1]
        size = decodes + prompt_tokens
        if size <= largest:
            size = self._step_sizes[bisect.bisect_left(self._step_sizes, size)]
            cost = self._step_seconds[size] / (self._step_seconds[largest] / largest)
        else:
            cost = float(size)
        return StepWork(decodes, size - decodes, pairs, cost)
