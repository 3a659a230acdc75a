"""`end_if_stopped`: a process that a signal has stopped is killed after a while, which frees its GPU and memory.

Ray asks processes to end, and one that is stopped does not hear. This file is also the program that watches.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

POLL_S = 1.0


def end_if_stopped(seconds: float, poll_s: float = POLL_S) -> None:
    """Have this process killed once SIGSTOP or the like has stopped it for so long. Linux.

    A process of about 8 MB watches it, and ends with it. If that is stopped too, as by a terminal, nothing happens.
    """
    # Without site-packages, for which this interpreter would need ten times as much.
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(seconds), str(poll_s)]
    subprocess.Popen(command, stdin=subprocess.DEVNULL)


def watch(pid: int, seconds: float, poll_s: float) -> None:
    """Kill a process, the parent of this one, when it has been stopped for so long; return when it is gone."""
    stopped = 0.0
    while stopped < seconds:
        time.sleep(poll_s)
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                state = file.read().rpartition(")")[2].split()[0]  # as in proc(5)
        except OSError:
            return
        if os.getppid() != pid:
            return
        stopped = stopped + poll_s if state == "T" else 0.0
    print(f"process {pid} has been stopped for {seconds:g} s and is killed", file=sys.stderr, flush=True)
    os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    watch(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))
