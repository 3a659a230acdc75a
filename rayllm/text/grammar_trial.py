"""Trials of grammars: a process of its own compiles each grammar first, because it may die of it.

The library has limits of its own, but a grammar that gets past them must cost its sender an error, and not everybody
the engine. So each trial is a child that a worker process forks, which has the model's tokens ready: to kill a trial
costs nothing but the trial. The kernel limits its memory, the worker kills it when its time is up, and its priority is
low, so that sequences which are decoded meanwhile hardly notice. It is not so low (SCHED_IDLE) that a busy machine
never lets it compute.

The worker is started by a command of its own and talks in lines of JSON. The process pools of libraries
(multiprocessing, concurrent.futures, pebble) do not fit. They import the caller's main module into each worker: that
takes seconds if it imports torch, and fails if it is a script without `if __name__ == "__main__"`. And they unpickle,
in the engine, what comes from a process that has worked on hostile input.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import subprocess
import sys

import msgspec

from rayllm import timeouts
from rayllm.api.sampling_params import StructuredOutputs
from rayllm.errors import InvalidRequestError
from rayllm.parent_death import end_with_parent
from rayllm.text.grammar import GrammarTokenizer, TokenizerData, bad_grammar
from rayllm.text.heap import give_back_memory

MAX_DATA_BYTES = 2 * 2**30  # of a trial's memory
NICE = 10  # a tenth of the share of those who do not give way
_CRASHED = "it is too complex: compiling it takes too much memory or too deep a stack"


class TrialWorker:
    """A worker process. It belongs to the thread that makes it: the kernel ends it with that thread.

    silence_s: seconds beyond a trial's limit after which it is given up. Raises RuntimeError if it does not start.
    """

    def __init__(self, data: TokenizerData, silence_s: float = timeouts.GRAMMAR_WORKER_SILENCE_S):
        self._silence_s = silence_s
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rayllm.text.grammar_trial", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},  # it finds the package where we found it
        )
        self._ask(msgspec.json.encode(data), timeouts.GRAMMAR_WORKER_START_S)

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def run(self, structure: StructuredOutputs, limit_s: float) -> int | None:
        """Bytes that the compiled grammar takes, roughly; None if it takes longer than limit_s seconds to compile.

        Raises InvalidRequestError for one that must be refused, RuntimeError if the worker itself died or is stuck.
        """
        answer = self._ask(msgspec.json.encode((structure, limit_s)), limit_s + self._silence_s)
        size_or_reason = msgspec.json.decode(answer, type=int | str | None)
        if isinstance(size_or_reason, str):
            raise bad_grammar(size_or_reason)
        return size_or_reason

    def close(self) -> None:
        """End the process, at once. May be called while the other thread is in `run`."""
        with contextlib.suppress(OSError), self._process:  # which closes the pipes and waits
            self._process.kill()

    def _ask(self, line: bytes, timeout: float) -> bytes:
        """The answer. Raises RuntimeError, and ends the process, if there is none within the timeout."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError, ValueError):  # the pipes are broken, or closed by another thread
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()
            answered, _, _ = select.select([self._process.stdout], [], [], timeout)
            if answered and (answer := self._process.stdout.readline()):  # a line comes whole
                return answer
        self.close()
        raise RuntimeError("the process that tries grammars does not answer")


def try_grammar(tokenizer: GrammarTokenizer, structure: StructuredOutputs) -> int | str:
    """Compile a grammar and follow it a little way: by how many bytes this process grew, or why it is refused."""
    before = _resident_bytes()
    try:
        _held = tokenizer.rehearse(structure)  # until the memory is measured
    except InvalidRequestError as error:
        return str(error).partition(": ")[2]
    return max(0, _resident_bytes() - before)


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _fork_trial(tokenizer: GrammarTokenizer, structure: StructuredOutputs, limit_s: float) -> bytes:
    """The answer to `TrialWorker.run`."""
    reader, writer = os.pipe()
    worker, child = os.getpid(), os.fork()
    if child == 0:
        try:
            end_with_parent(worker)
            os.nice(NICE)
            os.write(writer, msgspec.json.encode(try_grammar(tokenizer, structure)))
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as answers:
        in_time = select.select([answers], [], [], limit_s)[0]
        if not in_time:
            os.kill(child, signal.SIGKILL)
        answer = answers.read()
    os.waitpid(child, 0)
    return (answer or msgspec.json.encode(_CRASHED)) if in_time else b"null"


def main(parent: int) -> None:
    """The worker: answer until the parent is gone."""
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_DATA_BYTES, MAX_DATA_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer = GrammarTokenizer(msgspec.json.decode(sys.stdin.buffer.readline(), type=TokenizerData))
    give_back_memory()  # so that growth shows
    print("ready", flush=True)
    for line in sys.stdin.buffer:
        structure, limit_s = msgspec.json.decode(line, type=tuple[StructuredOutputs, float])
        print(_fork_trial(tokenizer, structure, limit_s).decode(), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
