"""A supervised process and all that it starts end together, whoever is killed; small real processes, no Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

LIMIT_S = 5

START = """
import os, subprocess, sys, time
import psutil
from rayllm.serve.cluster.processes import end_descendants, ignore_signals, supervise, watch_processes

def start_some():
    "A child, one that ignores SIGTERM in a session of its own, and an orphan."
    subprocess.Popen(["sleep", "77"])
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(77)"
    subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    subprocess.run(["sh", "-c", "sleep 77 & exit 0"], check=True)
"""
SUPERVISED = """
orders = supervise(0.5, lambda: 1.0)
start_some()
print(os.getpid(), flush=True)
sys.stdin.readline()
"""


class Supervised:
    """A process that supervises the script's rest. child: that runs it. others: all below it, child and guard too."""

    def __init__(self, script, **options):
        self.process = subprocess.Popen(
            [sys.executable, "-c", START + SUPERVISED + script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            **options,
        )
        self.child = psutil.Process(int(self.process.stdout.readline()))
        self.itself = psutil.Process(self.process.pid)
        self.others = self.itself.children(recursive=True)
        assert self.child in self.others
        assert len(self.others) == 5, self.others
        print(file=self.process.stdin, flush=True)  # from here on it runs the script

    def check_nothing_is_left(self):
        left = psutil.wait_procs(self.others, timeout=LIMIT_S)[1]
        for each in left:
            each.kill()
        assert not left, left

    def line(self):
        return self.process.stdout.readline().strip()

    def send(self, number):
        self.process.send_signal(number)
        return self

    def code(self):
        return self.process.wait(LIMIT_S)


WAIT = "time.sleep(77)\n"


def ignore_hangup():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def heed_hangup():
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_parent_that_is_killed_takes_all_along(number):
    found = Supervised(WAIT)
    assert found.send(number).code() == -number
    found.check_nothing_is_left()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_guard_that_is_killed_takes_all_along(number):
    found = Supervised(WAIT)
    found.child.parent().send_signal(number)
    assert found.code() == 128 + number
    found.check_nothing_is_left()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, 137), (signal.SIGABRT, 134)])
def test_a_child_that_is_killed_takes_all_along(number, code):
    found = Supervised(WAIT)
    os.kill(found.child.pid, number)
    assert found.code() == code
    found.check_nothing_is_left()


@pytest.mark.parametrize(("end", "code"), [("", 0), ("sys.exit(2)", 2), ("raise ValueError", 1)])
def test_the_parent_exits_as_the_child_does_and_ends_the_rest(end, code):
    found = Supervised(end)
    assert found.code() == code
    found.check_nothing_is_left()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_are_orders(number):
    """Also if somebody sends them to both, as a terminal or a service manager does."""
    found = Supervised(
        "orders.update.wait(); orders.update.clear(); print('update', orders.stop.is_set(), flush=True)\n"
        "orders.stop.wait(); time.sleep(0.3); print('stop', orders.update.is_set(), flush=True)\n",
        preexec_fn=heed_hangup,  # under nohup, these tests would hand that on
    )
    os.kill(found.child.pid, signal.SIGUSR1)
    found.send(signal.SIGUSR1)
    assert found.line() == "update False"
    os.kill(found.child.pid, number)
    found.send(number)
    assert found.line() == "stop False"
    assert found.code() == 0
    found.check_nothing_is_left()


def test_nohup_holds():
    found = Supervised("orders.stop.wait(); print('stop', flush=True)\n", preexec_fn=ignore_hangup)
    found.send(signal.SIGHUP).send(signal.SIGHUP)
    time.sleep(0.2)
    assert found.process.poll() is None
    found.send(signal.SIGTERM)
    assert found.line() == "stop"
    assert found.code() == 0


def test_a_terminal_that_goes_says_so_twice():
    found = Supervised(
        "orders.stop.wait(); print('stop', flush=True); time.sleep(0.3); print('done', flush=True)\n",
        preexec_fn=heed_hangup,
    )
    assert found.send(signal.SIGHUP).line() == "stop"
    assert found.send(signal.SIGHUP).line() == "done"
    assert found.code() == 0


def test_a_second_signal_to_stop_ends_everything_at_once():
    found = Supervised("orders.stop.wait()\nprint('stop', flush=True)\n" + WAIT)
    found.send(signal.SIGTERM)
    assert found.line() == "stop"
    assert found.send(signal.SIGUSR1).send(signal.SIGINT).code() == 128 + signal.SIGINT
    found.check_nothing_is_left()


def test_one_that_does_not_stop_in_time_is_ended():
    found = Supervised(WAIT, stderr=subprocess.PIPE)
    found.send(signal.SIGTERM)
    assert found.code() == 1
    assert found.process.stderr.read() == "error: the server has not stopped within 1 s\n"
    found.check_nothing_is_left()


@pytest.mark.parametrize("ignored", [False, True])
def test_the_end_of_a_process_that_is_needed_ends_all(ignored):
    """Also while the child hangs in a call."""
    found = Supervised(
        "orders.update.wait()\none = psutil.Process(subprocess.Popen(['sleep', '77']).pid)\n"
        "two = psutil.Process(subprocess.Popen(['sleep', '77']).pid)\n"
        "ignored = watch_processes([one, two], 'lost')\n"
        f"if {ignored}: ignored.set()\n"
        f"two.kill()\ntime.sleep({1 if ignored else 77})\n",
        stderr=subprocess.PIPE,
    )
    found.send(signal.SIGUSR1)
    assert found.code() == (0 if ignored else 1)
    assert found.process.stderr.read() == ("" if ignored else "error: lost: sleep has ended\n")
    found.check_nothing_is_left()


def test_what_ends_by_itself_has_its_time():
    code = (
        "start_some()\nbefore = time.monotonic()\n"
        "subprocess.Popen(['sh', '-c', 'sleep 0.5; echo done'])\n"
        "end_descendants(1.0)\nprint(1.0 <= time.monotonic() - before < 3)\n"
        "before = time.monotonic()\nend_descendants(60)\nprint(time.monotonic() - before < 1)\n"
    )
    adopt = "import ctypes; ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)\n"  # as `supervise` does
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", START + adopt + code], capture_output=True, text=True, check=True, timeout=30
    )
    assert done.stdout.split() == ["done", "True", "True"]
    assert time.monotonic() - started < 20
