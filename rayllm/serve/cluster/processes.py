"""No process of ours is left behind, however it ends: Ray's agents outlive a raylet that was killed. Linux only."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from typing import Any, NamedTuple

import psutil

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
STOP, UPDATE = b"s", b"u"  # what the parent writes into its pipe to the child


class Orders(NamedTuple):
    """What the user has told the server by signals."""

    # SIGINT or SIGTERM. A second one ends everything at once.
    stop: threading.Event
    # SIGUSR1.
    update: threading.Event


def supervise(grace_s: float) -> Orders:
    """Go on in a child process, while this one waits for it, hands signals on as orders, and exits as the child does.

    Whichever of the two ends first, by whatever signal, the other one ends all that the child has started: processes
    whose parent dies become children of the two, which can find them. To be called before there is any thread.
    grace_s: how long processes may take to end by themselves after the child has ended in good order.
    """
    orders = Orders(threading.Event(), threading.Event())
    out_of_pipe, into_pipe = os.pipe()
    child = os.fork()
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if child == 0:
        os.close(into_pipe)
        os.setpgid(0, 0)  # Ctrl-C in a terminal goes to the parent alone
        ignore_signals()
        threading.Thread(target=_obey, args=(out_of_pipe, orders), name="rayllm-parent", daemon=True).start()
        return orders

    def hand_on(number: int, _frame: Any) -> None:
        if number == signal.SIGUSR1 or not orders.stop.is_set():
            with contextlib.suppress(BrokenPipeError):
                os.write(into_pipe, UPDATE if number == signal.SIGUSR1 else STOP)
        else:
            end_descendants(0.0)
            os._exit(128 + number)
        if number != signal.SIGUSR1:
            orders.stop.set()

    os.close(out_of_pipe)
    for number in SIGNALS:
        signal.signal(number, hand_on)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    end_descendants(grace_s if code >= 0 else 0.0)
    sys.stdout.flush()
    os._exit(code if code >= 0 else 128 - code)


def ignore_signals() -> None:
    """Leave `SIGNALS` to the parent, also those that somebody sends to both. Processes that this one starts do not."""
    for number in SIGNALS:
        signal.signal(number, lambda _number, _frame: None)


def _obey(pipe: int, orders: Orders) -> None:
    """In the child: take orders until the end of the parent, which holds the other end of the pipe."""
    while order := os.read(pipe, 1):
        (orders.update if order == UPDATE else orders.stop).set()
    end_descendants(0.0)
    os._exit(1)


def end_descendants(grace_s: float) -> None:
    """Wait until all descendants have ended; kill those that have not after grace_s seconds.

    Nothing else in this process may wait for children any more.
    """
    deadline = time.monotonic() + grace_s
    while alive := psutil.Process().children(recursive=True):
        late = time.monotonic() - deadline
        if late > 1:
            break  # killed, but stuck in the kernel
        for process in alive:
            with contextlib.suppress(psutil.Error):
                if late > 0:
                    process.kill()
                process.wait(0)  # also those that this process has adopted are its to reap
        time.sleep(0.02)
