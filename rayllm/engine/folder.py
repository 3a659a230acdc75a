"""`PrivateFolder`: a folder for sockets, which is removed when its owner has died too, however that was."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

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


def remove_orphaned_folders() -> None:
    """Remove what processes of this user that were killed have left in the folder of temporary files."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            stack.callback(os.close, folder)
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: its owner lives
            if os.fstat(folder).st_uid == os.getuid():
                shutil.rmtree(path, ignore_errors=True)
