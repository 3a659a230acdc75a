"""No process or folder of ours is left behind, however it ends: Ray's agents outlive a raylet that is killed. Linux."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, NoReturn

import psutil

from rayllm.engine.folder import remove_orphaned_folders

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
STOP, UPDATE = b"s", b"u"  # what the parent writes into its pipe to the child


class Orders(NamedTuple):
    """What the user has told the server by signals."""

    # SIGINT or SIGTERM. A second one ends everything at once.
    stop: threading.Event
    # SIGUSR1.
    update: threading.Event


def supervise(grace_s: float, stop_s: Callable[[], float]) -> Orders:
    """Go on in a child process, while this one waits for it, hands signals on as orders, and exits as the child does.

    Whichever of the two ends first, by whatever signal, the other one ends all that the child has started: processes
    whose parent dies become children of the two, which can find them. To be called before there is any thread.
    grace_s: how long processes may take to end by themselves after the child has ended in good order.
    stop_s: how long the child may take to end once `Orders.stop` is set; then it is made to, with exit code 1.
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
        threading.Thread(target=_end_in_time, args=(orders.stop, stop_s), name="rayllm-end", daemon=True).start()
        return orders

    is_told_to_stop = False

    def hand_on(number: int, _frame: Any) -> None:
        nonlocal is_told_to_stop
        if is_told_to_stop and number != signal.SIGUSR1:
            _end_all(0.0, 128 + number)
        is_told_to_stop |= number != signal.SIGUSR1
        with contextlib.suppress(BrokenPipeError):
            os.write(into_pipe, UPDATE if number == signal.SIGUSR1 else STOP)

    os.close(out_of_pipe)
    for number in SIGNALS:
        signal.signal(number, hand_on)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    sys.stdout.flush()
    _end_all(grace_s if code >= 0 else 0.0, code if code >= 0 else 128 - code)


def ignore_signals() -> None:
    """Leave `SIGNALS` to the parent, also those that somebody sends to both. Processes that this one starts do not."""
    for number in SIGNALS:
        signal.signal(number, lambda _number, _frame: None)


def _obey(pipe: int, orders: Orders) -> None:
    """In the child: take orders until the end of the parent, which holds the other end of the pipe."""
    while order := os.read(pipe, 1):
        (orders.update if order == UPDATE else orders.stop).set()
    _end_all(0.0, 1)


def _end_in_time(stop: threading.Event, stop_s: Callable[[], float]) -> None:
    stop.wait()
    time.sleep(seconds := stop_s())
    give_up(f"the server has not stopped within {seconds:g} s")


def watch_processes(processes: Iterable[psutil.Process], lost: str) -> threading.Event:
    """Give up as soon as one of these processes ends, unless the event that this returns is set by then.

    It takes a thread of its own, since calls into a Ray that has lost one of them may never return. lost: what that
    means, for the error.
    """
    ignored = threading.Event()
    names, ends = {}, select.poll()
    for process in processes:
        names[end := os.pidfd_open(process.pid)] = process.name()
        ends.register(end, select.POLLIN)

    def watch() -> None:
        for end, _ in ends.poll():
            if not ignored.is_set():
                give_up(f"{lost}: {names[end]} has ended")

    threading.Thread(target=watch, name="rayllm-watch", daemon=True).start()
    return ignored


def give_up(why: str) -> NoReturn:
    """End this process, with an error and exit code 1, and all that it has started, without waiting for anything."""
    print(f"error: {why}", file=sys.stderr, flush=True)
    _end_all(0.0, 1)


def _end_all(grace_s: float, code: int) -> NoReturn:
    end_descendants(grace_s)
    remove_orphaned_folders()
    os._exit(code)


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
