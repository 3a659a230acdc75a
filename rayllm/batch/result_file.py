"""`ResultFile`: the output of a batch as JSON lines, which a later run goes on with."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import msgspec

from rayllm.batch.lines import BatchResult
from rayllm.batch.runner import Counts
from rayllm.errors import ConfigError, OutputError

MAX_PENDING_BYTES = 2**20
START = b'{"id":"batch_req_'  # of a line


class InUseError(ConfigError):
    """Another process has the file open."""


class NoResultsError(ConfigError):
    """The file holds something else than the results of a batch."""


class ResultFile:
    """Results are appended to a file, which one process at a time may have open.

    A last line that broke off is cut off when it is opened. answered: ids of its results, those that were added too.
    counts: of the results that it had when it was opened; `run_batch` goes on with it. Raises NoResultsError,
    InUseError, and another ConfigError for a file that cannot be opened.
    """

    def __init__(self, path: Path):
        self.answered: set[str] = set()
        self.counts = Counts()
        self._path, self._size = path, 0  # bytes of whole lines
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        try:
            if path.exists() and not (path.is_file() or path.is_dir()):  # a device keeps nothing
                raise ConfigError(f"the output file {path} is no regular file")
            self._file: BinaryIO = path.open("a+b")
        except OSError as error:
            raise ConfigError(f"the output file {path} cannot be opened: {error.strerror or error}") from None
        try:
            self._lock()
            self._read()
        except BaseException:
            self._file.close()
            raise

    def add(self, result: BatchResult) -> None:
        """Append a result, at the latest when `flush` is called. Raises OutputError."""
        line = result.line()
        self.answered.add(result.id)
        self._pending.append(line)
        self._pending_bytes += len(line)
        if self._pending_bytes > MAX_PENDING_BYTES:
            self.flush()

    def flush(self) -> None:
        """Hand what was added to the system, so that it is there even if this process is killed. Raises OutputError;
        half a line is cut off then, and the next call tries again.
        """
        lines = memoryview(b"".join(self._pending))
        written, file = 0, self._file.fileno()
        try:
            while written < len(lines):
                written += os.write(file, lines[written:])
        except OSError as error:
            with suppress(OSError):  # else it is cut off when the file is opened again
                os.ftruncate(file, self._size)
            raise self._no_write(error) from None
        self._size += written
        self._pending, self._pending_bytes = [], 0

    def close(self) -> None:
        """Bring all that was added to the disk, and let others open the file. Raises OutputError."""
        try:
            self.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._no_write(error) from None
        finally:
            self._file.close()

    def _no_write(self, error: OSError) -> OutputError:
        return OutputError(f"the output file {self._path} cannot be written: {error.strerror}")

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InUseError(f"the output file {self._path} is in use by another process") from None

    def _read(self) -> None:
        self._file.seek(0)
        read = msgspec.json.Decoder(BatchResult).decode
        for number, line in enumerate(self._file, start=1):
            if not line.endswith(b"\n") and _may_begin_a_result(line):
                self._file.truncate(self._size)
                break
            try:
                result = read(line)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                reason = f"its line {number} is not a result"
                raise NoResultsError(f"the output file {self._path} is no output of a batch: {reason}") from None
            if result.id in self.answered:
                raise NoResultsError(f"the output file {self._path} has two results with the id {result.id!r}")
            self.answered.add(result.id)
            self.counts.add(result)
            self._size += len(line)
        self.counts.prompt_tokens = self.counts.completion_tokens = 0


def _may_begin_a_result(line: bytes) -> bool:
    """Whether a line that broke off can be one of ours: the last line of any other file is not to be lost."""
    begin = line[: 2 * len(START)].replace(b" ", b"")
    return begin.startswith(START) or START.startswith(begin)
