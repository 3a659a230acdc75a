"""`GrammarCompiler`: compiles requests' grammars away from the engine's loop, and keeps the latest."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from rayllm.api.sampling_params import StructuredOutputs
from rayllm.errors import ModelError
from rayllm.text.grammar import Grammar, GrammarTokenizer, MaskThreads, TokenizerData, bad_grammar
from rayllm.text.grammar_trial import TrialWorker
from rayllm.text.tokenizer import load_tokenizer

COMPILE_LIMIT_S = 5.0
MAX_GRAMMARS = 128
MAX_GRAMMAR_BYTES = 512 * 2**20  # of all that are kept
MAX_ONE_GRAMMAR_BYTES = 64 * 2**20
NUM_COMPILING = 2  # at once, so that one slow grammar does not hold up all
REST = 19.0  # a compilation in this process holds up the engine: the next one waits so many times as long as it took


class GrammarCompiler:
    """Makes `Grammar`s for one model. Thread-safe.

    The model's tokens are prepared at once, on a thread: it takes up to a second with the interpreter held, during
    which a running engine would stand still. limit_s: seconds of computing that one grammar may take.
    """

    def __init__(self, model: str, vocab_size: int, eos_token_ids: list[int], limit_s: float = COMPILE_LIMIT_S):
        self._limit_s = limit_s
        self._lock = threading.Lock()  # of the next line
        self._grammars: dict[bytes, Future[Grammar]] = {}  # compiled or being compiled, the latest asked for last
        self._turn = threading.Lock()  # of the thread that compiles in this process, and of the next line
        self._rested = 0.0  # time.monotonic() from which the next may
        self._closed = False
        self._workers: dict[int, TrialWorker] = {}  # of each compiling thread, once it has needed one
        self.threads = MaskThreads(max(2, min(8, (os.cpu_count() or 2) // 2)))
        self._pool = ThreadPoolExecutor(NUM_COMPILING, "rayllm-grammars")
        self._tokenizer = self._pool.submit(_prepare, model, vocab_size, eos_token_ids)

    def compile(self, structure: StructuredOutputs, gently: bool = False) -> Future[Grammar]:
        """The grammar, soon. Its exception is InvalidRequestError for one that cannot be used.

        gently: the engine has work meanwhile, which compilations one right after the other would slow down.
        """
        key = msgspec.msgpack.encode(structure)
        with self._lock:
            self._forget()
            future = self._grammars.pop(key, None) or self._pool.submit(self._compile, structure, gently)
            self._grammars[key] = future
            return future

    def close(self) -> None:
        """Stop all threads and processes; what is being compiled fails."""
        self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.threads.close()
        for worker in list(self._workers.values()):
            worker.close()

    def _compile(self, structure: StructuredOutputs, gently: bool) -> Grammar:
        try:
            tokenizer = self._tokenizer.result()
        except (ModelError, ValueError) as error:
            raise bad_grammar(f"the model's tokenizer cannot be used for it: {error}") from None
        worker = self._workers.get(threading.get_ident())
        if worker is None or not worker.alive:  # if it died meanwhile, that is not this grammar's fault
            worker = self._workers[threading.get_ident()] = TrialWorker(tokenizer.data, self._limit_s)
        try:
            size = worker.run(structure)
        finally:
            if self._closed:
                worker.close()
        if size > MAX_ONE_GRAMMAR_BYTES:
            limit = MAX_ONE_GRAMMAR_BYTES >> 20
            raise bad_grammar(f"it is too complex: compiled it takes {size >> 20} MiB, and the limit is {limit}")
        with self._turn:
            if gently:
                time.sleep(max(0.0, self._rested - time.monotonic()))
            started = time.monotonic()
            matcher, mask = tokenizer.compile(structure)
            self._rested = time.monotonic() + REST * (time.monotonic() - started)
        return Grammar(tokenizer, matcher, mask, self.threads, size + len(msgspec.msgpack.encode(structure)))

    def _forget(self) -> None:
        """Let go of what failed, of what reached a limit, with all that its lexer holds, and of the oldest too many."""
        count = size = 0
        for key, future in reversed(list(self._grammars.items())):
            if not future.done():
                continue
            if future.cancelled() or future.exception() is not None or future.result().broken:
                del self._grammars[key]
                continue
            count, size = count + 1, size + future.result().size
            if count > MAX_GRAMMARS or size > MAX_GRAMMAR_BYTES:
                del self._grammars[key]


def _prepare(model: str, vocab_size: int, eos_token_ids: list[int]) -> GrammarTokenizer:
    tokenizer = load_tokenizer(model)
    return GrammarTokenizer(TokenizerData(tokenizer.backend.to_str(), tokenizer.vocab_size, vocab_size, eos_token_ids))
