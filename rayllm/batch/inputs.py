"""Where the lines of a batch come from: a file, or standard input."""

from __future__ import annotations

import asyncio
import os
import stat
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

from rayllm.batch.lines import split_lines
from rayllm.errors import ConfigError

CHUNK_BYTES = 2**18
STDIN = "-"


class FileInput:
    """A file of lines, which can be read more than once."""

    def __init__(self, path: Path):
        """Raises ConfigError if it cannot be read."""
        self._path = path
        try:
            if path.exists() and not (path.is_file() or path.is_dir()):  # a pipe has its lines once
                raise ConfigError(f"the input file {path} is no regular file; use {STDIN}, and give it standard input")
            path.open("rb").close()
        except OSError as error:
            raise ConfigError(f"the input file {path} cannot be read: {error.strerror}") from None

    def lines(self) -> AsyncIterator[bytes]:
        """Its lines, from the first on. Raises OSError."""
        return split_lines(self._chunks())

    async def count(self) -> int:
        """How many lines it has."""
        return sum([1 async for _line in self.lines()])

    async def _chunks(self) -> AsyncIterator[bytes]:
        with self._path.open("rb") as file:
            async for chunk in _file_chunks(file):
                yield chunk


async def stdin_lines() -> AsyncIterator[bytes]:
    """The lines of standard input, which may come slowly. Raises ConfigError if it is closed."""
    if sys.stdin is None:
        raise ConfigError("standard input is closed, and there is no other input")
    source = sys.stdin.buffer
    async for line in split_lines(_pipe_chunks(source) if _may_wait(source) else _file_chunks(source)):
        yield line


def _may_wait(source: BinaryIO) -> bool:
    """Whether reading may wait for somebody to write: not for files and /dev/null."""
    mode = os.fstat(source.fileno()).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or source.isatty()


async def _file_chunks(file: BinaryIO) -> AsyncIterator[bytes]:
    while chunk := file.read(CHUNK_BYTES):
        yield chunk
        await asyncio.sleep(0)


async def _pipe_chunks(pipe: BinaryIO) -> AsyncIterator[bytes]:
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
    transport, _protocol = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    try:
        while chunk := await reader.read(CHUNK_BYTES):
            yield chunk
    finally:
        transport.close()
