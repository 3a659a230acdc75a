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

from rayllm import timeouts
from rayllm.engine.folder import remove_orphaned_folders

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
STOP, UPDATE = b"s", b"u"  # what the parent writes into its pipe to the child


class Orders(NamedTuple):
    """What the user has told the server by signals."""

    # SIGINT, SIGTERM, or SIGHUP, when the terminal goes. A second SIGINT or SIGTERM ends all at once.
    stop: threading.Event
    # SIGUSR1.
    update: threading.Event


def supervise(grace_s: float, stop_s: Callable[[], float]) -> Orders:
    """Go on in a process below this one, which hands signals on as orders and exits as that one does.

    Between the two is a guard. Whichever of the three ends first, by whatever signal, one of the others ends all that
    was started: processes whose parent dies become children of this one or the guard. Neither of them has threads or a
    connection to Ray, which ends a process in mid-work if it loses its raylet. To be called before there is any thread.
    grace_s: how long processes may take to end by themselves after an end with exit code 0.
    stop_s: how long the end may take once `Orders.stop` is set; then it comes at once, with exit code 1.
    """
    out_of_pipe, into_pipe = os.pipe()
    parent = os.getpid()
    _adopt_orphans()
    guard = os.fork()
    if guard == 0:
        os.close(into_pipe)
        os.setpgid(0, 0)  # Ctrl-C in a terminal goes to the parent alone
        ignore_signals()
        _adopt_orphans()
        child = os.fork()
        if child == 0:
            orders = Orders(threading.Event(), threading.Event())
            threading.Thread(target=_obey, args=(out_of_pipe, orders), name="rayllm-orders", daemon=True).start()
            threading.Thread(target=_end_in_time, args=(orders.stop, stop_s), name="rayllm-end", daemon=True).start()
            return orders
        _wait_for_end((child, parent))
        _end_with(child, grace_s)

    is_told_to_stop = False

    def hand_on(number: int, _frame: Any) -> None:
        nonlocal is_told_to_stop
        # A terminal that goes may say so twice: by itself, and by its shell.
        if is_told_to_stop and number not in (signal.SIGUSR1, signal.SIGHUP):
            _end_all(0.0, 128 + number)
        is_told_to_stop |= number != signal.SIGUSR1
        with contextlib.suppress(BrokenPipeError):
            os.write(into_pipe, UPDATE if number == signal.SIGUSR1 else STOP)

    os.close(out_of_pipe)
    for number in SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as nohup leaves it
            signal.signal(number, hand_on)
    _wait_for_end((guard,))
    _end_with(guard, grace_s)


def ignore_signals() -> None:
    """Leave `SIGNALS` to the parent, also those that somebody sends to both. Processes that this one starts do not."""
    for number in SIGNALS:
        signal.signal(number, lambda _number, _frame: None)


def watch_processes(processes: Iterable[psutil.Process], lost: str) -> threading.Event:
    """End this process as soon as one of these has ended, unless the event that this returns is set by then.

    It takes a thread of its own, since calls into a Ray that has lost one of them may never return. lost: what that
    means, for the error.
    """
    names = {os.pidfd_open(each.pid): each.name() for each in processes}
    ignored = threading.Event()

    def watch() -> None:
        end = select.select(list(names), [], [])[0][0]
        if not ignored.is_set():
            _give_up(f"{lost}: {names[end]} has ended")

    if names:
        threading.Thread(target=watch, name="rayllm-watch", daemon=True).start()
    return ignored


def _adopt_orphans() -> None:
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _obey(pipe: int, orders: Orders) -> None:
    while order := os.read(pipe, 1):
        (orders.update if order == UPDATE else orders.stop).set()


def _end_in_time(stop: threading.Event, stop_s: Callable[[], float]) -> None:
    stop.wait()
    time.sleep(seconds := stop_s())
    _give_up(f"the server has not stopped within {seconds:g} s")


def _give_up(why: str) -> NoReturn:
    """End this process, without waiting for anything. Who supervises it ends the rest."""
    print(f"error: {why}", file=sys.stderr, flush=True)
    os._exit(1)


def _wait_for_end(processes: Iterable[int]) -> None:
    """Of one of these; it may be gone already."""
    with contextlib.suppress(ProcessLookupError):
        select.select([os.pidfd_open(each) for each in processes], [], [])


def _end_with(child: int, grace_s: float) -> NoReturn:
    """End all that was started, and exit as the child did if it has ended."""
    ended, status = os.waitpid(child, os.WNOHANG)
    code = os.waitstatus_to_exitcode(status) if ended else 1
    sys.stdout.flush()
    _end_all(0.0 if code else grace_s, code if code >= 0 else 128 - code)


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
        if late > timeouts.DIE_S:
            break  # killed, but stuck in the kernel
        for process in alive:
            with contextlib.suppress(psutil.Error):
                if late > 0:
                    process.kill()
                process.wait(0)  # also those that this process has adopted are its to reap
        time.sleep(0.02)
