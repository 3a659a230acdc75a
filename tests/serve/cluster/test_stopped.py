"""Processes that a signal stops: real ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import psutil

WATCHED = """
import sys
from rayllm.serve.cluster.stopped import end_if_stopped
end_if_stopped(1.0, poll_s=0.05)
print("ready", flush=True)
sys.stdin.readline()
"""


@contextmanager
def watched():
    """A process that is to end when it is stopped, and the one that watches it."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", WATCHED], stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            (watcher,) = psutil.Process(process.pid).children()
            yield process, watcher
            psutil.wait_procs([watcher], timeout=20)
            assert not watcher.is_running()
        finally:
            process.kill()


def test_a_process_that_stays_stopped_is_killed():
    with watched() as (process, _watcher):
        os.kill(process.pid, signal.SIGSTOP)
        assert process.wait(20) == -signal.SIGKILL
        assert process.stderr.read() == f"process {process.pid} has been stopped for 1 s and is killed\n"


def test_one_that_goes_on_is_not():
    with watched() as (process, _watcher):
        for _ in range(3):
            os.kill(process.pid, signal.SIGSTOP)
            time.sleep(0.4)
            os.kill(process.pid, signal.SIGCONT)
            time.sleep(0.4)
        process.stdin.close()
        assert process.wait(20) == 0


def test_one_that_is_stopped_together_with_its_watcher_is_not():
    """As by Ctrl-Z in a terminal."""
    with watched() as (process, watcher):
        for each in (process.pid, watcher.pid):
            os.kill(each, signal.SIGSTOP)
        time.sleep(1.5)
        for each in (process.pid, watcher.pid):
            os.kill(each, signal.SIGCONT)
        time.sleep(0.3)
        process.stdin.close()
        assert process.wait(20) == 0
