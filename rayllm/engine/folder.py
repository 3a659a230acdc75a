"""Folders that are removed when their owners have died too, however that was.

`PrivateFolder` has one owner, `SharedFolder` several processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

from rayllm.errors import StartupError

PREFIX = "rayllm-run-"


class PrivateFolder:
    """A new folder that only this user can enter. Making one removes those whose owners have died.

    The owner holds a lock on it, which the kernel takes back from the dead.
    """

    def __init__(self) -> None:
        remove_orphaned_folders()
        hidden = tempfile.mkdtemp(prefix=f".{PREFIX}")  # nobody may find it without its lock
        self._lock = os.open(hidden, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = Path(hidden).with_name(Path(hidden).name[1:])
        os.rename(hidden, self.path)

    def remove(self) -> None:
        """Remove it and what is in it; to be called once."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


class SharedFolder:
    """A folder of all processes on this host that know its name; the last one to leave removes it.

    Joining one removes the folders whose processes have all died.

    name: letters and digits that nobody can guess. Each process holds a lock on the folder that others can hold too.
    Raises StartupError if another user has it.
    """

    def __init__(self, name: str) -> None:
        self.path = Path(tempfile.gettempdir(), f"{PREFIX}{name}")
        while not self._join():
            time.sleep(0.01)  # somebody removes it just now
        remove_orphaned_folders()

    def _join(self) -> bool:
        self.path.mkdir(mode=0o700, exist_ok=True)
        try:
            lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return False
        status = os.fstat(lock)
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            os.close(lock)
            raise StartupError(f"{self.path} must belong to this user, and to nobody else")
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if os.path.samestat(status, os.stat(self.path)):
                self._lock = lock
                return True
        os.close(lock)
        return False

    def leave(self) -> None:
        """Leave it; to be called once."""
        with contextlib.suppress(BlockingIOError):  # others have it
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_orphaned_folders() -> None:
    """Remove what processes of this user that were killed have left in the folder of temporary files."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            stack.callback(os.close, folder)
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: its owner lives
            if os.fstat(folder).st_uid == os.getuid():
                shutil.rmtree(path, ignore_errors=True)
