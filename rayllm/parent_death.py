"""`end_with_parent`: the kernel kills this process when its parent ends. Linux."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LIBC = ctypes.CDLL(None)  # here, so that nothing is loaded between a fork and what the child runs


def end_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when the thread that started it ends, or its parent's process.

    parent: its id, if it may have ended before this is called; then this process ends at once.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(1)
