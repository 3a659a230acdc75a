"""Launches kernels or, within `compile_only`, only compiles them: many side by side, before they are first launched.

A kernel is compiled when it is first launched, one after the other; on a machine with many cores that is most of an
engine's first start. The compiler keeps Python's lock while it works, so threads would gain nothing: children of this
process compile into the kernel cache on disk, from which this process then loads.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.sharedctypes import Synchronized
from typing import Any

from triton import AsyncCompileMode

CACHED_SECONDS = 0.05  # loading a kernel from the cache takes less, compiling one more
STUCK_SECONDS = 300.0  # no kernel takes as long
PR_SET_PDEATHSIG = 1

logger = logging.getLogger(__name__)
_compiling = False


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., object]:
    """What launches `kernel` over `grid` when it is called with the kernel's arguments; all launches go this way.

    Within `compile_only` the call compiles the kernel for these arguments, if need be, and does not run it.
    """
    if _compiling:
        return partial(kernel.warmup, grid=grid)
    launcher: Callable[..., object] = kernel[grid]
    return launcher


class _Jobs(Executor):
    """Collects what is submitted; `run` does it all."""

    def __init__(self) -> None:
        self._jobs: list[tuple[Callable[[], Any], Future[Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._jobs.append((partial(fn, *args, **kwargs), future))
        return future

    def run(self) -> None:
        """Compile, in this process until the cache turns out not to hold all, then in children too."""
        alone = True
        for i, (job, future) in enumerate(self._jobs):
            started = time.monotonic()
            try:
                future.set_result(job())
            except Exception as error:  # for whoever waits for the future
                future.set_exception(error)
            if alone and time.monotonic() - started > CACHED_SECONDS:
                alone = False
                compile_in_children([job for job, _future in self._jobs[i + 1 :]])

    def give_up(self, error: BaseException) -> None:
        for _job, future in self._jobs:
            future.set_exception(error)

    def error(self) -> BaseException | None:
        """The first of those that `run` met."""
        return next((found for _job, future in self._jobs if (found := future.exception()) is not None), None)


def compile_in_children(jobs: list[Callable[[], object]]) -> None:
    """Do jobs in as many forked children as there are cores, each taking the next one that nobody has taken.

    Of use for what jobs leave on disk: results and errors are lost with the children. Jobs must not use CUDA, nor any
    lock that another thread of this process may hold.
    """
    context = multiprocessing.get_context("fork")
    taken = context.Value("i", 0)
    count = min(len(jobs), len(os.sched_getaffinity(0)))
    children = [context.Process(target=_work, args=(jobs, taken)) for _ in range(count)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads, see above
        for child in children:
            child.start()
    deadline = time.monotonic() + STUCK_SECONDS
    for child in children:
        child.join(max(0.0, deadline - time.monotonic()))
        if child.is_alive():
            logger.warning("compiling kernels in a child process took more than %g s; it goes on here", STUCK_SECONDS)
            child.kill()
            child.join()


def _work(jobs: list[Callable[[], object]], taken: Synchronized[int]) -> None:
    # Devices that the parent holds open would stay in use if it died before its children.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    while True:
        with taken.get_lock():
            index, taken.value = taken.value, taken.value + 1
        if index >= len(jobs):
            return
        with suppress(Exception):  # the job's error shows where it is done again
            jobs[index]()


@contextmanager
def compile_only(*, ignore_errors: bool = False) -> Iterator[None]:
    """Within, `launch` compiles kernels, if need be, and does not run them: what they would write stays as it is.

    At the end all are compiled. For one thread, while no other one launches kernels. Raises what the compiler raises,
    unless errors are ignored: then they show where such a kernel is launched.
    """
    global _compiling
    jobs = _Jobs()
    # The mode would stay active for good if it raised errors itself at its end.
    with AsyncCompileMode(jobs, ignore_errors=True):
        _compiling = True
        try:
            yield
        except BaseException as error:
            jobs.give_up(error)
            raise
        finally:
            _compiling = False
        jobs.run()
    failure = jobs.error()
    if failure is not None and not ignore_errors:
        raise failure
