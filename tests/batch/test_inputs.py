"""What lines are read from: files, which are read twice, and standard input, whatever it is."""

import asyncio
import os
import sys

import pytest

from rayllm.batch.inputs import FileInput, stdin_lines
from rayllm.errors import ConfigError


async def read_all(lines):
    return [line async for line in lines]


@pytest.mark.parametrize("kind", ["file", "pipe"])
def test_a_file_and_a_pipe_are_standard_input(tmp_path, monkeypatch, kind):
    if kind == "file":
        (tmp_path / "in.jsonl").write_bytes(b"a\n\nb\n")
        source = (tmp_path / "in.jsonl").open()
    else:
        reading, writing = os.pipe()
        os.write(writing, b"a\n\nb\n")
        os.close(writing)
        source = os.fdopen(reading)
    monkeypatch.setattr(sys, "stdin", source)
    assert asyncio.run(asyncio.wait_for(read_all(stdin_lines()), 10)) == [b"a", b"b"]


def test_standard_input_without_anything_has_no_lines(monkeypatch):
    with open(os.devnull) as source:
        monkeypatch.setattr(sys, "stdin", source)
        assert asyncio.run(asyncio.wait_for(read_all(stdin_lines()), 10)) == []


def test_closed_standard_input_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ConfigError, match="standard input is closed"):
        asyncio.run(read_all(stdin_lines()))


def test_what_has_its_lines_once_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=r"pipe is no regular file; use -"):
        FileInput(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="Is a directory"):
        FileInput(tmp_path)
    with pytest.raises(ConfigError, match="No such file"):
        FileInput(tmp_path / "absent")
