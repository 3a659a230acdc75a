"""No process of ours is left behind, however it ends: Ray's agents outlive a raylet that was killed. Linux only."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def supervise(grace_s: float) -> None:
    """Go on in a child process, while this one waits for it, passes signals on, and exits as the child does.

    Whichever of the two ends first, by whatever signal, the other one ends all that the child has started: processes
    whose parent dies become children of the two, which can find them. To be called before there is any thread.
    grace_s: how long processes may take to end by themselves after the child has ended in good order.
    """
    alive, held = os.pipe()
    child = os.fork()
    _adopt_orphans()
    if child == 0:
        os.close(held)
        os.setpgid(0, 0)  # Ctrl-C in a terminal goes to the parent alone, which passes it on once
        threading.Thread(target=_end_with, args=(alive,), name="rayllm-parent", daemon=True).start()
        return

    def forward(number: int, _frame: Any) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    for number in FORWARDED:
        signal.signal(number, forward)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    end_descendants(grace_s if code >= 0 else 0.0)
    sys.stdout.flush()
    os._exit(code if code >= 0 else 128 - code)


def _end_with(alive: int) -> None:
    """In the child: wait for the end of the parent, which holds the other end of the pipe."""
    os.read(alive, 1)
    end_descendants(0.0)
    os._exit(1)


def _adopt_orphans() -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


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
