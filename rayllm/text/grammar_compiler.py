"""`GrammarCompiler`: compiles requests' grammars away from the engine's loop, and keeps the latest.

Nobody can tell from a grammar what it will cost. So each gets a short trial first, and only those that need longer get
a long one, in a lane of their own: what is cheap never waits for what is expensive. In both lanes clients take turns,
and of a client's grammars the smallest goes first. What waits is bounded, for each client and in all.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import msgspec

from rayllm import timeouts
from rayllm.api.sampling_params import StructuredOutputs
from rayllm.errors import InvalidRequestError, ModelError, OverloadedError
from rayllm.text.grammar import PARAM, Grammar, GrammarTokenizer, MaskThreads, TokenizerData, bad_grammar
from rayllm.text.grammar_trial import TrialWorker
from rayllm.text.tokenizer import load_tokenizer

MAX_GRAMMARS = 128
MAX_GRAMMAR_BYTES = 512 * 2**20  # of all that are kept
MAX_ONE_GRAMMAR_BYTES = 64 * 2**20
MAX_REFUSALS = 1024  # that are remembered
MAX_WAITING = 256  # of all clients together, and of one; those that are being compiled count too
MAX_WAITING_OF_CLIENT = 64
# A compilation in this process holds up the engine: the next one of its lane waits so many times as long as it took,
# and at most so many times as long as a trial may take there.
REST = 19.0
MAX_REST = 2.0


@dataclass(order=True)
class _Job:
    """A grammar to be compiled. They are ordered by size, in bytes, and then as they came."""

    size: int
    number: int
    key: bytes
    structure: StructuredOutputs = field(compare=False)
    client: str | None = field(compare=False)
    gently: bool = field(compare=False)
    future: Future[Grammar] = field(compare=False, default_factory=Future)


class _Lane:
    """A thread that runs one job at a time. limit_s: seconds that a trial may take."""

    def __init__(self, limit_s: float):
        self.limit_s = limit_s
        self.worker: TrialWorker | None = None  # once it has been needed
        self.rested = 0.0  # time.monotonic() from which the next grammar may be compiled in this process
        self.pool = ThreadPoolExecutor(1, "rayllm-grammars")
        self._lock = threading.Lock()
        self._waiting: dict[str | None, list[_Job]] = {}  # heaps by client; whose turn comes first is first

    def put(self, job: _Job, run: Callable[[_Job, _Lane], None]) -> None:
        """Call run(job, self) when it is the job's turn."""
        with self._lock:
            jobs = self._waiting.setdefault(job.client, [])
            if job.client is not None:  # whose jobs are few, unless those of aborted requests pile up behind a slow one
                jobs[:] = sorted(each for each in jobs if not each.future.cancelled())
            heapq.heappush(jobs, job)
        self.pool.submit(self._run_next, run)

    def _run_next(self, run: Callable[[_Job, _Lane], None]) -> None:
        with self._lock:
            if not self._waiting:
                return  # a job was cancelled
            client, jobs = next(iter(self._waiting.items()))
            del self._waiting[client]
            job = heapq.heappop(jobs)
            if jobs:
                self._waiting[client] = jobs  # behind the others
        run(job, self)


class GrammarCompiler:
    """Makes `Grammar`s for one model. Thread-safe.

    The model's tokens are prepared at once, on a thread: it takes up to a second with the interpreter held, during
    which a running engine would stand still. first_s, limit_s: seconds that a grammar's first trial may take, and its
    second. new_worker: what makes the processes that try grammars. clock: seconds.
    """

    def __init__(
        self,
        model: str,
        vocab_size: int,
        eos_token_ids: list[int],
        first_s: float = timeouts.GRAMMAR_FIRST_S,
        limit_s: float = timeouts.GRAMMAR_S,
        new_worker: Callable[[TokenizerData], TrialWorker] = TrialWorker,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.threads = MaskThreads(max(2, min(8, (os.cpu_count() or 2) // 2)))
        self._new_worker, self._clock = new_worker, clock
        self._numbers = itertools.count()
        self._closed = False
        self._lock = threading.Lock()  # of the next three, in which what was asked for last comes last
        self._jobs: dict[bytes, _Job] = {}
        self._grammars: dict[bytes, tuple[Grammar, Future[Grammar]]] = {}
        self._refusals: dict[bytes, tuple[float, Future[Grammar]]] = {}  # with the time until which they are remembered
        self._fast, self._slow = self._lanes = _Lane(first_s), _Lane(limit_s)
        self._tokenizer = self._fast.pool.submit(_prepare, model, vocab_size, eos_token_ids)

    def compile(self, structure: StructuredOutputs, client: str | None = None, gently: bool = False) -> Future[Grammar]:
        """The grammar, soon. Its exception is InvalidRequestError for one that cannot be used. It may be cancelled.

        client: who shares the compiler with others; None for this program itself, which may ask for as many as it
        likes. gently: the engine has work meanwhile, which compilations one right after the other would slow down.
        Raises OverloadedError if too many wait.
        """
        encoded = msgspec.msgpack.encode(structure)
        key = hashlib.sha256(encoded).digest()
        with self._lock:
            until, refusal = self._refusals.pop(key, (0.0, None))
            if refusal is not None and self._clock() < until:
                self._refusals[key] = until, refusal
                return refusal
            grammar, compiled = self._grammars.pop(key, (None, None))
            if grammar is not None and compiled is not None and not grammar.broken:
                self._grammars[key] = grammar, compiled
                return compiled
            self._jobs = {each: job for each, job in self._jobs.items() if not job.future.done()}
            if key not in self._jobs:
                if client is not None:
                    self._check_room(client)
                job = self._jobs[key] = _Job(len(encoded), next(self._numbers), key, structure, client, gently)
                self._fast.put(job, self._run)
            return self._jobs[key].future

    def close(self) -> None:
        """Stop all threads and processes; what is being compiled is cancelled."""
        self._closed = True
        self.threads.close()
        for lane in self._lanes:
            lane.pool.shutdown(wait=False, cancel_futures=True)
            if lane.worker is not None:
                lane.worker.close()
        for job in list(self._jobs.values()):
            job.future.cancel()

    def _check_room(self, client: str) -> None:
        own = sum(job.client == client for job in self._jobs.values())
        for count, limit, whose in ((own, MAX_WAITING_OF_CLIENT, " of yours"), (len(self._jobs), MAX_WAITING, "")):
            if count >= limit:
                message = f"{PARAM}: {count} grammars{whose} wait to be compiled, and at most {limit} may; try again"
                raise OverloadedError(message, PARAM)

    def _run(self, job: _Job, lane: _Lane) -> None:
        """Settle the job's future, or pass the job on to the slow lane."""
        if job.future.cancelled():
            return
        try:
            grammar = self._compile(job, lane)
        except BaseException as error:  # a panic of the library is no Exception
            if job.future.set_running_or_notify_cancel():
                if isinstance(error, InvalidRequestError):
                    self._remember(job, error)
                job.future.set_exception(error)
            return
        if grammar is None:
            self._slow.put(job, self._run)
        elif job.future.set_running_or_notify_cancel():
            self._remember(job, grammar)
            job.future.set_result(grammar)

    def _compile(self, job: _Job, lane: _Lane) -> Grammar | None:
        """None if it takes longer than the fast lane allows."""
        try:
            tokenizer = self._tokenizer.result()
        except (ModelError, ValueError) as error:
            raise bad_grammar(f"the model's tokenizer cannot be used for it: {error}") from None
        if lane.worker is None or not lane.worker.alive:
            lane.worker = self._new_worker(tokenizer.data)
        try:
            size = lane.worker.run(job.structure, lane.limit_s)
        finally:
            if self._closed:
                lane.worker.close()
        if size is None and lane is self._fast:
            return None
        if size is None:
            raise bad_grammar(f"compiling it takes longer than {lane.limit_s:g} s; make it simpler")
        if size > MAX_ONE_GRAMMAR_BYTES:
            limit = MAX_ONE_GRAMMAR_BYTES >> 20
            raise bad_grammar(f"it is too complex: compiled it takes {size >> 20} MiB, and the limit is {limit}")
        if job.gently:
            time.sleep(max(0.0, lane.rested - time.monotonic()))
        started = time.monotonic()
        matcher, mask = tokenizer.compile(job.structure)
        took = time.monotonic() - started
        lane.rested = started + took + min(REST * took, MAX_REST * lane.limit_s)
        return Grammar(tokenizer, matcher, mask, self.threads, size + job.size)

    def _remember(self, job: _Job, outcome: Grammar | InvalidRequestError) -> None:
        """Let go of the oldest too many, and of what reached a limit, with all that its lexer holds."""
        with self._lock:
            if isinstance(outcome, InvalidRequestError):
                self._refusals[job.key] = self._clock() + timeouts.GRAMMAR_REFUSED_S, job.future
                if len(self._refusals) > MAX_REFUSALS:
                    del self._refusals[next(iter(self._refusals))]
                return
            self._grammars[job.key] = outcome, job.future
            size = 0
            for count, (key, (grammar, _)) in enumerate(reversed(list(self._grammars.items())), start=1):
                size += grammar.size
                if grammar.broken or count > MAX_GRAMMARS or size > MAX_GRAMMAR_BYTES:
                    del self._grammars[key]


def _prepare(model: str, vocab_size: int, eos_token_ids: list[int]) -> GrammarTokenizer:
    tokenizer = load_tokenizer(model)
    return GrammarTokenizer(TokenizerData(tokenizer.backend.to_str(), tokenizer.vocab_size, vocab_size, eos_token_ids))
