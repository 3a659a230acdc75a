"""No process of ours is left behind, also when a start is broken off: Ray's agents outlive a raylet that dies early."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
# PR_SET_PDEATHSIG, kept by exec; a parent that has ended before it was set is seen by another one in its place.
_RUN = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def adopt_orphans() -> None:
    """From now on, descendants whose parent dies become children of this process, which can find them. Linux only."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def dying_with_parent(command: Sequence[str]) -> list[str]:
    """A command that runs this one such that the kernel ends it with SIGKILL when the thread that started it ends."""
    return [sys.executable, "-S", "-c", _RUN, str(os.getpid()), *command]


def end_descendants(grace_s: float) -> list[int]:
    """Wait until all descendants have ended; kill those that have not after grace_s seconds. Returns whom it killed.

    Nothing else in this process may wait for children any more.
    """
    deadline = time.monotonic() + grace_s
    killed: set[int] = set()
    while alive := _descendants(os.getpid()):
        if time.monotonic() > deadline + 1:
            break  # killed, but stuck in the kernel
        if time.monotonic() > deadline:
            for pid in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            killed |= alive
        _reap()
        time.sleep(0.02)
    _reap()
    return sorted(killed)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _descendants(pid: int) -> set[int]:
    """Ids of the live processes below `pid`; empty where there is no /proc."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(int(stat.parent.name))
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found.update(below)
        waiting.extend(below)
    return found
