"""Parts of a `rayllm launch` that are killed, and the whole: what clients get, and what is left. Each server but the
first starts on the port of the one before, as soon as that has ended."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
from support.driver import wait_for
from support.launched import Launched, free_port, private_folders, session_processes

# Until all processes of a launch that was killed have ended, and until launch has ended when Ray is lost. Each takes
# 0.4 to 2 s on a machine that is not busy.
ENDED_S = 30


class Server(Launched):
    """One with two API servers. folders: those that its processes have made."""

    def __init__(self, folder, port):
        super().__init__(folder / "log", "--port", str(port), "--device", "cpu", "--num-api-servers", "2")
        self.url = f"http://127.0.0.1:{port}"
        self.folders = set()

    def complete(self, tokens=3):
        body = {"prompt": "def", "max_tokens": tokens, "ignore_eos": True}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=60)

    def find(self, text):
        """The processes of whose command line this is a part."""
        return [pid for pid, command in session_processes(self.session_id) if text in command]

    def describe(self, processes):
        """For a failure: these, all of the session, and what the server has said."""
        return "\n".join(map(str, [*processes, *session_processes(self.session_id), self.log.read_text()]))

    def check_that_nothing_is_left(self, processes):
        assert self.folders
        _, left = psutil.wait_procs(processes, timeout=ENDED_S)
        assert not left, self.describe(left)
        assert not [path for path in self.folders if path.exists()]


@pytest.fixture(scope="module")
def port():
    return free_port()


@pytest.fixture(scope="module")
def server(tmp_path_factory, port):
    launched = Server(tmp_path_factory.mktemp("server"), port)
    try:
        launched.wait_for("\nready ")
        yield launched
    finally:
        launched.kill()


def test_clients_see_little_of_an_api_server_that_is_killed(server):
    """Its requests go to the other one. With none left the answer is the API's own 503, until there is another one."""
    (controller,) = server.find("ServeController")
    os.kill(controller, signal.SIGSTOP)  # it would start another one
    with ThreadPoolExecutor(6) as clients:
        answers = [clients.submit(server.complete, 60) for _ in range(6)]
        time.sleep(0.5)
        first, second = server.find(":ApiServer")
        os.kill(first, signal.SIGKILL)
        assert [answer.result().status_code for answer in answers] == [200] * 6
        os.kill(second, signal.SIGKILL)
        refused = [server.complete()]
        os.kill(controller, signal.SIGCONT)
        while (answer := server.complete()).status_code != 200:
            refused.append(answer)
            time.sleep(0.1)
    for answer in refused:
        assert (answer.status_code, answer.headers["content-type"]) == (503, "application/json")
        assert int(answer.headers["retry-after"]) > 0
        assert answer.json()["error"]["type"] == "server_error"


def test_an_engine_that_is_killed_leaves_no_folder(server):
    before = private_folders(server.session_id)  # the engine's, and that of stored responses and files
    (engine,) = server.find(":engine-")
    os.kill(engine, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while server.complete().status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    after = private_folders(server.session_id)
    (gone,) = before - after
    assert not gone.exists()
    server.folders |= after


# The last test that needs the server.
def test_a_killed_launch_leaves_nothing_behind(server):
    wait_for(lambda: {server.complete().status_code for _ in range(6)} == {200})  # both API servers have the new engine
    body = {"prompt": "def", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as response:
        assert response.status_code == 200
        next(response.iter_lines())
        processes = psutil.Process(server.process.pid).children(recursive=True)
        names = {each.name() for each in processes}
        assert {"haproxy", "raylet", "gcs_server"} <= names, server.describe(processes)
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
    server.check_that_nothing_is_left(processes)


# The same code watches all processes of Ray.
@pytest.mark.parametrize("name", ["gcs_server", pytest.param("raylet", marks=pytest.mark.full_matrix)])
def test_a_server_that_loses_ray_says_so_and_ends(tmp_path, port, name):
    launched = Server(tmp_path, port)
    try:
        launched.wait_for("\nready ")
        assert launched.complete().json()["usage"]["completion_tokens"] == 3
        launched.folders = private_folders(launched.session_id)
        processes = psutil.Process(launched.process.pid).children(recursive=True)
        victims = [each for each in processes if each.name() == name]
        assert len(victims) == 1, launched.describe(processes)
        said = len(launched.log.read_text())
        victims[0].kill()
        assert launched.process.wait(ENDED_S) == 1
        # Ray itself may have something to say too, before and after.
        assert f"error: Ray is lost on this host: {name} has ended" in launched.log.read_text()[said:].splitlines()
        launched.check_that_nothing_is_left(processes)
        with pytest.raises(httpx.ConnectError):
            launched.complete()
    finally:
        launched.kill()
