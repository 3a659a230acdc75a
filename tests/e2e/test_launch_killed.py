"""`kill -9` of a `rayllm launch` that answers a request: nothing of it lives on, and its port is free for the next."""

from __future__ import annotations

import os
import signal
import time

import httpx
import psutil
from support.launched import Launched, free_port

LIMIT_S = 5  # until all processes have ended


def test_a_killed_launch_leaves_nothing_behind(tmp_path):
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    body = {"prompt": "def", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    options = ("--port", str(port), "--device", "cpu")
    first = Launched(tmp_path / "first", *options)
    second = None
    try:
        first.wait_for("ready")
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as response:
            assert response.status_code == 200
            next(response.iter_lines())
            processes = psutil.Process(first.process.pid).children(recursive=True)
            names = {each.name() for each in processes}
            assert {"haproxy", "raylet", "gcs_server"} <= names, names
            os.kill(first.process.pid, signal.SIGKILL)
            killed = time.monotonic()
            first.process.wait()
        _, left = psutil.wait_procs(processes, timeout=LIMIT_S - (time.monotonic() - killed))
        assert not left, left
        second = Launched(tmp_path / "second", *options)
        second.wait_for("ready")
        answer = httpx.post(f"{url}/v1/completions", json=body | {"max_tokens": 3, "stream": False}, timeout=30)
        assert answer.json()["usage"]["completion_tokens"] == 3
    finally:
        first.kill()
        if second is not None:
            second.kill()
