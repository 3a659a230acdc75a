"""Terms: one writer at a time for a folder that many processes share, without locks, and whatever their clocks say.

A term is a subfolder with a number. Readers look at the last one only, and who wants to write begins the next one. It
is prepared under another name, with all that it starts from, and gets its number by a rename, which fails if there is
a term with that number: of all who try one succeeds. So a process that was stopped and goes on after others have taken
over finds a later term, writes into a folder that nobody reads, and cannot begin the term after its own.

    <number>/         a term, as a whole or not at all
    <number>/writer   who has begun it
    .new-*/           one that is prepared, or whose writer died meanwhile
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

FOLDER_MODE = 0o700


def last_term(folder: Path) -> int | None:
    """The number of the term that counts; None if there is none, or no folder."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return None
    return max((int(name) for name in names if name.isdecimal()), default=None)


def begin_term(folder: Path, number: int, prepare: Callable[[Path], None]) -> bool:
    """Begin the term with this number, one more than the last. Returns False if another process was faster.

    prepare: writes the term's files into the folder that it is given. Terms before are removed: it must have put all
    that is still needed of them into this one. Raises OSError.
    """
    draft, term, writer = folder / f".new-{secrets.token_hex(16)}", folder / str(number), secrets.token_bytes(16)
    try:
        draft.mkdir(FOLDER_MODE)
        (draft / "writer").write_bytes(writer)
        prepare(draft)
        draft.rename(term)
    except FileNotFoundError:  # what it starts from has been removed, or all of it
        pass
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    # Over NFS a rename may succeed and yet be told to have failed, when the server's answer was lost.
    if _writer(term) != writer:
        return False
    if last_term(folder) != number:  # there was one of that number before, which has been followed and removed
        shutil.rmtree(term, ignore_errors=True)
        return False
    for name in os.listdir(folder):
        if name.isdecimal() and int(name) < number:
            shutil.rmtree(folder / name, ignore_errors=True)
    return True


def _writer(term: Path) -> bytes | None:
    try:
        return (term / "writer").read_bytes()
    except FileNotFoundError:
        return None
