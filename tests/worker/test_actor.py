"""What an actor does without other ranks."""

from __future__ import annotations

import os
import signal
import subprocess

import psutil
from support.stand_ins import AddingRank, cpu_config

from rayllm.worker.actor import Whereabouts, WorkerActor


def test_a_standby_ends_the_rank_before_it_even_if_that_is_stopped():
    actor = WorkerActor(1, cpu_config(tensor_parallel_size=2), AddingRank)
    with subprocess.Popen(["sleep", "60"]) as other, subprocess.Popen(["sleep", "60"]) as mine:
        try:
            created = [psutil.Process(each.pid).create_time() for each in (other, mine)]
            places = [
                Whereabouts(each.pid, at, "CPU", "a node", "10.0.0.1")
                for each, at in zip((other, mine), created, strict=True)
            ]
            os.kill(mine.pid, signal.SIGSTOP)
            reused = places[1]._replace(created=places[1].created - 60)
            actor.end([places[0], reused], 5.0)
            assert mine.poll() is None, "its number belonged to another process then"
            actor.end(places, 5.0)
            assert not psutil.pid_exists(mine.pid)
            assert other.poll() is None
            actor.end(places, 5.0)  # it is gone already
        finally:
            other.kill()
            mine.kill()
