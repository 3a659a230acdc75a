"""`Trial`: compiles a grammar in a process of its own first, which can be killed.

The library has limits of its own, but a grammar that gets past them must cost its sender an error, not all others the
engine. Parent and child talk in msgpack over a socket pair: Setup -> Ready, then StructuredOutputs -> Verdict.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import resource
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from rayllm.api.sampling_params import StructuredOutputs
from rayllm.errors import InvalidRequestError
from rayllm.text.grammar import GrammarTokenizer, bad_grammar

START_S = 60.0  # for the child to be ready; it imports little, but the machine may be busy
MAX_DATA_BYTES = 2 * 2**30  # of the child's memory
LATEST = 6.0


class Setup(msgspec.Struct, frozen=True):
    """Parent to child, once: the arguments of GrammarTokenizer."""

    tokenizer_json: str
    num_tokens: int
    vocab_size: int
    eos_token_ids: list[int]

    def make(self) -> GrammarTokenizer:
        """The tokenizer. Raises ValueError."""
        return GrammarTokenizer(self.tokenizer_json, self.num_tokens, self.vocab_size, self.eos_token_ids)


class Verdict(msgspec.Struct, frozen=True):
    """Child to parent: why a grammar is refused (None: it is not), and by how many bytes it made the child grow."""

    error: str | None
    size: int


class Trial:
    """A child process, started when it is first needed and again after one that died. One thread uses it at a time.

    limit_s: seconds of computing that one grammar may take. The child computes only when a core has nothing else to do,
    so that whoever generates tokens meanwhile does not notice; it may take LATEST times as long by the clock.
    """

    def __init__(self, setup: Setup, limit_s: float):
        self._setup, self._limit_s = setup, limit_s
        self._child: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def run(self, structure: StructuredOutputs) -> int:
        """Bytes that the compiled grammar takes, roughly.

        Raises InvalidRequestError for a grammar to be refused, RuntimeError if the child does not start.
        """
        if self._child is not None and self._child.poll() is not None:
            self.close()  # it died meanwhile, which is not this grammar's fault
        connection = self._connection or self._start()
        try:
            connection.send_bytes(msgspec.msgpack.encode(structure))
            if not self._answers(connection):
                self.close()
                raise bad_grammar(f"compiling it takes longer than {self._limit_s:g} s; make it simpler")
            verdict = msgspec.msgpack.decode(connection.recv_bytes(), type=Verdict)
        except (EOFError, OSError):
            self.close()
            raise bad_grammar("it is too complex: compiling it takes too much memory or too deep a stack") from None
        if verdict.error is not None:
            raise bad_grammar(verdict.error)
        return verdict.size

    def close(self) -> None:
        """End the child; the next `run` starts another. May be called while another thread is in `run`."""
        child, self._child = self._child, None
        connection, self._connection = self._connection, None
        if child is not None:
            child.kill()
            child.wait()
        if connection is not None:
            connection.close()

    def _answers(self, connection: Connection) -> bool:
        """Wait for the child's answer as long as it may take. False if it does not come."""
        assert self._child is not None
        deadline = time.monotonic() + LATEST * self._limit_s
        limit = _computed_s(self._child.pid) + self._limit_s
        while time.monotonic() < deadline:
            left = limit - _computed_s(self._child.pid)
            if connection.poll(min(max(left, 0.0), 1.0)):
                return True
            if left <= 0.0:
                return False
        return False

    def _start(self) -> Connection:
        ours, theirs = multiprocessing.Pipe()
        # The package may be importable only because of where the parent was started.
        path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
        with theirs:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "rayllm.text.grammar_trial", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": path},
            )
        try:
            ours.send_bytes(msgspec.msgpack.encode(self._setup))
            ready = ours.poll(START_S) and ours.recv_bytes()
        except (EOFError, OSError):
            ready = False
        if not ready:
            self.close()
            ours.close()
            raise RuntimeError("the process that tries grammars does not start")
        self._connection = ours
        return ours


def try_grammar(tokenizer: GrammarTokenizer, structure: StructuredOutputs) -> Verdict:
    """Compile a grammar and see what comes of it."""
    _trim()
    before = _resident_bytes()
    try:
        compiled = tokenizer.compile(structure)
    except InvalidRequestError as error:
        return Verdict(str(error).partition(": ")[2], 0)
    size = max(0, _resident_bytes() - before)
    del compiled
    return Verdict(None, size)


def _computed_s(pid: int) -> float:
    """Seconds of computing of a process so far. Raises OSError if it is gone."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _trim() -> None:
    """Give freed memory back, where the C library can, so that growth shows."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def main() -> None:
    """The child: answer until the parent is gone."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_DATA_BYTES, MAX_DATA_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection = Connection(int(sys.argv[1]))
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        tokenizer = msgspec.msgpack.decode(connection.recv_bytes(), type=Setup).make()
        connection.send_bytes(b"ready")
        while True:
            structure = msgspec.msgpack.decode(connection.recv_bytes(), type=StructuredOutputs)
            connection.send_bytes(msgspec.msgpack.encode(try_grammar(tokenizer, structure)))


if __name__ == "__main__":
    main()
