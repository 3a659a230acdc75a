"""Trials of grammars: a worker process compiles each grammar first, because it may die of it.

The library has limits of its own, but a grammar that gets past them must cost its sender an error, and not everybody
the engine. So the kernel limits the worker: its computing time, its memory, and its scheduling class, with which it
computes only when a core has nothing else to do, so that sequences which are decoded meanwhile do not notice.

The worker is started by a command of its own and talks in lines of JSON. The process pools of libraries
(multiprocessing, concurrent.futures, pebble) do not fit. They import the caller's main module into each worker: that
takes seconds if it imports torch, and fails if it is a script without `if __name__ == "__main__"`. And they unpickle,
in the engine, what comes from a process that has worked on hostile input.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import subprocess
import sys

import msgspec

from rayllm.api.sampling_params import StructuredOutputs
from rayllm.errors import InvalidRequestError
from rayllm.text.grammar import GrammarTokenizer, TokenizerData, bad_grammar

START_S = 60.0  # for a worker to become ready; it imports little, but the machine may be busy
MAX_DATA_BYTES = 2 * 2**30  # of a worker's memory
LATEST = 6.0  # by the clock a trial may take so many times its computing time, as the worker waits for idle cores
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class TrialWorker:
    """A worker process. It belongs to the thread that makes it: the kernel ends it with that thread.

    limit_s: seconds of computing that one grammar may take. Raises RuntimeError if the process does not start.
    """

    def __init__(self, data: TokenizerData, limit_s: float):
        self._limit_s = limit_s
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rayllm.text.grammar_trial", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},  # it finds the package where we found it
        )
        if not self._ask(msgspec.json.encode((data, limit_s)), START_S):
            self.close()
            raise RuntimeError("the process that tries grammars does not start")

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def run(self, structure: StructuredOutputs) -> int:
        """Bytes that the compiled grammar takes, roughly. Raises InvalidRequestError for one that must be refused."""
        answer = self._ask(msgspec.json.encode(structure), LATEST * self._limit_s)
        if not answer:
            self.close()
            if self._process.returncode == -signal.SIGPROF:
                raise bad_grammar(f"compiling it takes longer than {self._limit_s:g} s; make it simpler")
            raise bad_grammar("it is too complex: compiling it takes too long, too much memory or too deep a stack")
        size_or_reason = msgspec.json.decode(answer, type=int | str)
        if isinstance(size_or_reason, str):
            raise bad_grammar(size_or_reason)
        return size_or_reason

    def close(self) -> None:
        """End the process, at once. May be called while the other thread is in `run`."""
        with contextlib.suppress(OSError), self._process:  # which closes the pipes and waits
            self._process.kill()

    def _ask(self, line: bytes, timeout: float) -> bytes:
        """The answer; b"" if the process died, or does not answer within the timeout."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()
            answered, _, _ = select.select([self._process.stdout], [], [], timeout)
            return self._process.stdout.readline() if answered else b""  # a line comes whole
        except (OSError, ValueError):  # the pipes are broken, or closed by another thread
            return b""


def try_grammar(tokenizer: GrammarTokenizer, structure: StructuredOutputs) -> int | str:
    """Compile a grammar; return by how many bytes this process grew, or why the grammar is refused."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)  # give freed memory back where the C library can, so that growth shows
    before = _resident_bytes()
    try:
        _compiled = tokenizer.compile(structure)  # held until the memory is measured
    except InvalidRequestError as error:
        return str(error).partition(": ")[2]
    return max(0, _resident_bytes() - before)


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def main(parent: int) -> None:
    """The worker: answer until the parent is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return  # it died before that
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_DATA_BYTES, MAX_DATA_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    data, limit_s = msgspec.json.decode(sys.stdin.buffer.readline(), type=tuple[TokenizerData, float])
    tokenizer = GrammarTokenizer(data)
    print("ready", flush=True)
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, limit_s)  # SIGPROF ends the process after so much computing
        size_or_reason = try_grammar(tokenizer, msgspec.json.decode(line, type=StructuredOutputs))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(msgspec.json.encode(size_or_reason).decode(), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
