"""Lines that a user types, with line editing and a history that is kept between runs where there is readline."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

HISTORY_LENGTH = 1000


def input_lines() -> Iterator[str]:
    """What the user types, up to an empty line or the end of input; Ctrl-C empties the line that is being typed.

    A second Ctrl-C in a row, on an empty line, is the end of input too. Lines of a pipe or file come as they are.
    """
    if not sys.stdin.isatty():
        yield from _piped_lines()
        return
    with _history():
        interrupted = False
        while True:
            try:
                line = input("> ").strip()
            except EOFError:
                print(file=sys.stderr)
                return
            except KeyboardInterrupt:
                if interrupted:
                    return
                interrupted = True
                print("\nCtrl-C again, Ctrl-D or an empty line leaves", file=sys.stderr)
                continue
            if not line:
                return
            interrupted = False
            yield line


def history_file() -> Path:
    """Where the history is kept: the XDG folder for such files, readable by its owner only."""
    folder = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(folder) / "rayllm" / "chat_history"


def _piped_lines() -> Iterator[str]:
    for line in sys.stdin:
        if not line.strip():
            return
        yield line.strip()


@contextlib.contextmanager
def _history() -> Iterator[None]:
    """Line editing and history while it is open. A history that can't be kept is said once and does no other harm."""
    readline = _readline()
    if readline is None:
        yield
        return
    path = history_file()
    with contextlib.suppress(OSError):  # none yet
        readline.read_history_file(path)
    try:
        yield
    finally:
        readline.set_history_length(HISTORY_LENGTH)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            readline.write_history_file(path)
        except OSError as error:
            print(f"the history cannot be kept in {path}: {error.strerror}", file=sys.stderr)


def _readline() -> ModuleType | None:
    """None where Python was built without it (Windows)."""
    try:
        import readline
    except ImportError:
        return None
    return readline
