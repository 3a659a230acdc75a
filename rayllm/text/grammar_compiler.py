"""`GrammarCompiler`: compiles requests' grammars away from the engine's loop, and keeps the latest."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import queue
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from rayllm.api.sampling_params import StructuredOutputs
from rayllm.errors import ModelError
from rayllm.text.grammar import Grammar, GrammarTokenizer, MaskThreads, bad_grammar
from rayllm.text.grammar_trial import Setup, Trial
from rayllm.text.tokenizer import load_tokenizer

COMPILE_LIMIT_S = 5.0
MAX_GRAMMARS = 128
MAX_GRAMMAR_BYTES = 512 * 2**20  # of all that are kept
MAX_ONE_GRAMMAR_BYTES = 64 * 2**20
NUM_COMPILING = 2  # at once, so that one slow grammar does not hold up all
REST = 19.0  # a compilation in this process holds up the engine: the next one waits so many times as long as it took

logger = logging.getLogger(__name__)


class GrammarCompiler:
    """Makes `Grammar`s for one model. Thread-safe.

    The model's tokens are prepared at once, on a thread: it takes up to a second with the interpreter held, during
    which a running engine would stand still. limit_s: seconds that compiling one grammar may take.
    """

    def __init__(self, model: str, vocab_size: int, eos_token_ids: list[int], limit_s: float = COMPILE_LIMIT_S):
        self._lock = threading.Lock()  # of the two below
        self._grammars: OrderedDict[bytes, Future[Grammar]] = OrderedDict()  # the latest used last
        self._sizes: dict[bytes, int] = {}  # of those that are compiled
        self._closed = False
        self._turn = threading.Lock()  # of who compiles in this process, and the next line
        self._rested = 0.0  # time.monotonic() from which the next may
        self._limit_s = limit_s
        self._trials: queue.SimpleQueue[Trial] = queue.SimpleQueue()
        self._all_trials: list[Trial] = []
        self.threads = MaskThreads(max(2, min(8, (os.cpu_count() or 2) // 2)))
        self._pool = ThreadPoolExecutor(NUM_COMPILING, "rayllm-grammars")
        self._tokenizer = self._pool.submit(self._prepare, model, vocab_size, eos_token_ids)

    def compile(self, structure: StructuredOutputs, gently: bool = False) -> Future[Grammar]:
        """The grammar, soon. Its exception is InvalidRequestError for one that cannot be used.

        gently: the engine has work meanwhile, which compilations one right after the other would slow down.
        """
        key = hashlib.sha256(msgspec.msgpack.encode(structure)).digest()
        with self._lock:
            self._drop_broken()
            future = self._grammars.get(key)
            if future is not None:
                self._grammars.move_to_end(key)
                return future
            future = self._grammars[key] = self._pool.submit(self._compile, structure, gently)
        future.add_done_callback(lambda done: self._settle(key, done))
        return future

    @property
    def kept(self) -> tuple[int, int]:
        """Grammars that are kept or being compiled, and the bytes of the former."""
        with self._lock:
            return len(self._grammars), sum(self._sizes.values())

    def close(self) -> None:
        """Stop all threads and processes; what is being compiled fails."""
        self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.threads.close()
        for trial in self._all_trials:
            with contextlib.suppress(OSError):
                trial.close()

    def _prepare(self, model: str, vocab_size: int, eos_token_ids: list[int]) -> GrammarTokenizer:
        tokenizer = load_tokenizer(model)
        setup = Setup(tokenizer.backend.to_str(), tokenizer.vocab_size, vocab_size, eos_token_ids)
        made = setup.make()
        for _ in range(NUM_COMPILING):
            trial = Trial(setup, self._limit_s)
            self._all_trials.append(trial)
            self._trials.put(trial)
        return made

    def _compile(self, structure: StructuredOutputs, gently: bool) -> Grammar:
        try:
            tokenizer = self._tokenizer.result()
        except (ModelError, ValueError) as error:
            raise bad_grammar(f"the model's tokenizer cannot be used for it: {error}") from None
        trial = self._trials.get()
        try:
            size = trial.run(structure)
        finally:
            self._trials.put(trial)
            if self._closed:
                trial.close()
        if size > MAX_ONE_GRAMMAR_BYTES:
            raise bad_grammar(
                f"it is too complex: compiled it takes {size >> 20} MiB, and the limit is {MAX_ONE_GRAMMAR_BYTES >> 20}"
            )
        with self._turn:
            if gently:
                time.sleep(max(0.0, self._rested - time.monotonic()))
            started = time.monotonic()
            matcher, mask = tokenizer.compile(structure)
            self._rested = time.monotonic() + REST * (time.monotonic() - started)
        return Grammar(tokenizer, matcher, mask, self.threads, size + len(msgspec.msgpack.encode(structure)))

    def _settle(self, key: bytes, done: Future[Grammar]) -> None:
        """Account for a grammar that is compiled; forget one that failed, and the longest unused ones beyond limits."""
        with self._lock:
            if done.cancelled() or done.exception() is not None:
                self._grammars.pop(key, None)
                return
            self._sizes[key] = done.result().size
            kept_bytes = sum(self._sizes.values())
            for old in [key for key in self._grammars if key in self._sizes]:
                if len(self._grammars) <= MAX_GRAMMARS and kept_bytes <= MAX_GRAMMAR_BYTES:
                    return
                del self._grammars[old]
                kept_bytes -= self._sizes.pop(old)

    def _drop_broken(self) -> None:
        """Let go of grammars that reached a limit, with all that their lexers hold. The lock is held."""
        for key in [key for key in self._sizes if self._grammars[key].result().broken]:
            del self._grammars[key], self._sizes[key]
