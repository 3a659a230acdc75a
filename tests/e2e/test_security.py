"""A live server under load and attack: keys, admission, clients that leave, open ports, drain. Bundled model, CPU."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import grpc
import httpx
import pytest
from ray.serve.generated import serve_pb2, serve_pb2_grpc
from support.launched import (
    Launched,
    clean_environment,
    free_port,
    haproxy_processes,
    private_folders,
    session_processes,
)

KEY, ENVIRONMENT_KEY = "sk-of-the-e2e-tests", "sk-of-the-environment"
AUTH = {"authorization": f"Bearer {KEY}"}
RUNNING, QUEUED = 4, 100
LONG = {"prompt": "The for statement", "max_tokens": 1500, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    (folder / "keys").write_text(f"{KEY} tester\n")
    port = free_port()
    os.environ["RAYLLM_API_KEY"] = ENVIRONMENT_KEY
    launched = Launched(
        folder / "log",
        "--port",
        str(port),
        "--device",
        "cpu",
        "--api-key-file",
        str(folder / "keys"),
        "--max-num-seqs",
        str(RUNNING),
        "--max-queued-requests",
        str(QUEUED),
        "--drain-timeout",
        "90",
    )
    del os.environ["RAYLLM_API_KEY"]
    launched.port, launched.url = port, f"http://127.0.0.1:{port}"
    try:
        launched.wait_for("\nready ")
        yield launched
    finally:
        launched.kill()


def get(server, path, **options):
    return httpx.get(server.url + path, headers=AUTH, timeout=30, **options)


def figures(server):
    """Name (and finished_reason or code) -> value, of all plain samples."""
    found = {}
    for name, labels, value in re.findall(r"^rayllm:(\w+){([^}]*)} (\S+)$", get(server, "/metrics").text, re.MULTILINE):
        label = re.search(r'(?:finished_reason|code)="(\w+)"', labels)
        found[f"{name}.{label.group(1)}" if label else name] = float(value)
    return found


def wait_until_idle(server, limit=30):
    end = time.monotonic() + limit
    while True:
        now = figures(server)
        busy = {name: now[name] for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")}
        if not any(busy.values()):
            return now
        assert time.monotonic() < end, busy
        time.sleep(0.05)


# ---- keys and ids


def test_keys_are_asked_for(server):
    assert httpx.get(server.url + "/health").status_code == 200
    for path in ("/", "/metrics", "/v1/models", "/openapi.json", "/nothing"):
        response = httpx.get(server.url + path)
        assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
    assert httpx.post(server.url + "/v1/completions", json={"prompt": "x"}).status_code == 401
    assert get(server, "/v1/models").status_code == 200
    assert httpx.get(server.url + "/metrics", headers={"authorization": f"Bearer {ENVIRONMENT_KEY}"}).status_code == 200
    assert "sk-of" not in server.log.read_text()
    # The process of the launch and its fork were started with it; all others are not.
    children = [pid for pid, command in session_processes(server.session_id) if "rayllm launch" not in command]
    assert len(children) > 3
    for pid in children:
        assert b"sk-of-the-environment" not in Path(f"/proc/{pid}/environ").read_bytes()


def test_an_answer_has_one_request_id(server):
    for stream in (False, True):
        body = {"prompt": "x", "max_tokens": 2, "stream": stream}
        response = httpx.post(server.url + "/v1/completions", json=body, headers=AUTH | {"x-request-id": "mine-7"})
        assert response.headers.get_list("x-request-id") == ["mine-7"]
    assert len(get(server, "/version").headers.get_list("x-request-id")) == 1


# ---- load


async def leave_after_first_chunk(client):
    async with client.stream("POST", "/v1/completions", json=LONG) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                return


def test_clients_that_leave_take_their_work_with_them(server):
    """100 clients leave in mid-stream: no sequence runs on and no block stays used."""
    before = wait_until_idle(server)

    async def scenario():
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=server.url, headers=AUTH, timeout=120, limits=limits) as client:
            await asyncio.gather(*(leave_after_first_chunk(client) for _ in range(100)))

    asyncio.run(scenario())
    after = wait_until_idle(server)
    assert after["generation_tokens_total"] - before["generation_tokens_total"] < 100 * 1500 / 4
    assert after["request_success_total.abort"] - before["request_success_total.abort"] == 100
    assert get(server, "/health").status_code == 200


def test_surplus_is_refused_and_the_rest_completes(server):
    wait_until_idle(server)

    async def scenario():
        limits = httpx.Limits(max_connections=300)
        async with httpx.AsyncClient(base_url=server.url, headers=AUTH, timeout=120, limits=limits) as client:

            def post(max_tokens):
                body = LONG | {"stream": False, "max_tokens": max_tokens}
                return asyncio.create_task(client.post("/v1/completions", json=body))

            accepted = [post(700) for _ in range(RUNNING)]
            while figures(server)["num_requests_running"] < RUNNING:
                await asyncio.sleep(0.05)
            accepted += [post(4) for _ in range(QUEUED)]
            while figures(server)["num_requests_waiting"] < QUEUED:
                await asyncio.sleep(0.05)
            surplus = await asyncio.gather(*(post(4) for _ in range(20)))
            assert not any(task.done() for task in accepted), "the queue moved before the surplus was refused"
            for response in surplus:
                assert (response.status_code, response.headers["retry-after"]) == (429, "1")
                assert response.json()["error"]["code"] == "queue_full"
            for response in await asyncio.gather(*accepted):
                assert response.status_code == 200
                assert response.json()["usage"]["completion_tokens"] in (4, 700)

    asyncio.run(scenario())
    assert wait_until_idle(server)["request_refused_total.queue_full"] >= 20


def test_large_bodies_leave_memory_flat(server):
    def resident():
        pages = 0
        for pid, _ in session_processes(server.session_id):
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def chunks():
        for _ in range(100):
            yield b"x" * 2**20

    def post(times):
        for _ in range(times):
            try:
                response = httpx.post(server.url + "/v1/completions", content=chunks(), headers=AUTH, timeout=60)
                assert response.status_code == 413
            except httpx.WriteError:
                pass  # the server answered and hung up before the body was through

    post(4)  # the allocators of proxy and API server take what such bodies need, once
    before = resident()
    post(16)  # 1,600 MiB
    assert resident() - before < 600 * 2**20
    assert get(server, "/health").status_code == 200


# ---- what listens


def listening(processes):
    """{port: address} of the TCP sockets that processes listen on."""
    inodes = set()
    for pid, _ in processes:
        for each in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                inodes.add(os.readlink(each))
            except OSError:
                continue
    ports = {}
    for table, size in (("/proc/net/tcp", 8), ("/proc/net/tcp6", 32)):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                address, port = fields[1].split(":")
                ports[int(port, 16)] = "loopback" if address == "0100007F" else address[:size]
    return ports


def test_what_listens_where(server):
    """HTTP and HAProxy's counters on loopback only; no dashboard; all else is Ray's and asks for the token."""
    processes = session_processes(server.session_id)
    haproxy = listening(haproxy_processes(server.session_id))
    assert server.port in haproxy and set(haproxy.values()) == {"loopback"}
    folders = private_folders(server.session_id)
    # The engine's, and that of stored responses and files; HAProxy needs none.
    assert [path.stat().st_mode & 0o777 for path in folders] == [0o700] * 2
    ports = listening(processes).keys() - haproxy.keys()
    assert 8265 not in ports
    assert ports, "Ray listens too"
    canary = server.log.parent / "it-ran"
    for port in ports:
        if port not in (44217, 44227):  # counters of Ray's autoscaler and dashboard, which it cannot be kept from
            check_shows_no_counters(port)
        for path in ("/api/jobs/", "/api/job_agent/jobs/", "/api/serve/applications/"):
            try:
                url = f"http://127.0.0.1:{port}{path}"
                response = httpx.post(url, json={"entrypoint": f"touch {canary}"}, timeout=2)
            except httpx.HTTPError:
                continue  # not HTTP, or not there
            assert response.status_code in (401, 403, 404, 405), (port, path, response.text)
        check_unpickles_nothing(port, canary)
    time.sleep(1)
    assert not canary.exists()


def test_nobody_else_reads_its_files(server):
    """The session's folder of Ray, and below it the request log."""
    commands = [Path(f"/proc/{pid}/cmdline").read_text() for pid, _ in session_processes(server.session_id)]
    (folder,) = {found for command in commands for found in re.findall(r"/[^\0=:]*/session_[\w-]+(?=/)", command)}
    assert any(parent.stat().st_mode & 0o777 == 0o700 for parent in Path(folder).parents), folder
    get(server, "/nothing")
    logs = list(Path(folder, "logs", "serve").glob("requests_*.log"))
    assert logs
    for log in logs:
        assert log.stat().st_mode & 0o777 == 0o600
    others = [path for path in Path(folder, "logs").rglob("*") if path.is_file() and path.stat().st_mode & 0o077]
    assert not others


def test_connections_without_a_request_leave_others_answered(server):
    silent = [socket.create_connection(("127.0.0.1", server.port), timeout=5) for _ in range(4100)]
    try:
        assert get(server, "/health").status_code == 200
        response = httpx.post(server.url + "/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers=AUTH)
        assert response.status_code == 200
    finally:
        for each in silent:
            each.close()


def check_shows_no_counters(port):
    try:
        response = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=2)
    except httpx.HTTPError:
        return  # not HTTP, or not there
    assert response.status_code in (401, 403, 404), (port, response.text[:200])


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self._path = str(path)

    def __reduce__(self):
        return open, (self._path, "w")


def check_unpickles_nothing(port, canary):
    """Ray Serve's replicas take pickles from each other; without the token they must not be looked at."""
    request = serve_pb2.ASGIRequest(pickled_request_metadata=pickle.dumps(Touch(canary)))
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel, pytest.raises(grpc.RpcError):
        serve_pb2_grpc.ASGIServiceStub(channel).HandleRequest(request, timeout=2)


def test_nobody_joins_the_cluster_without_the_token(server):
    commands = [Path(f"/proc/{pid}/cmdline").read_text().split("\0") for pid, _ in session_processes(server.session_id)]
    found = [part for command in commands for part in command if part.startswith("--gcs-address=")]
    address = found[0].partition("=")[2]
    code = (
        f"import ray; ray.init(address={address!r}, log_to_driver=False, logging_level='FATAL');"
        "print(ray.get(ray.remote(lambda: 'it ran').remote(), timeout=20))"
    )
    environments = ({"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64})
    intruders = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=clean_environment() | environment,
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for environment in environments
    ]
    for intruder in intruders:
        try:
            output, _ = intruder.communicate(timeout=90)
        except subprocess.TimeoutExpired:
            intruder.kill()
            output, _ = intruder.communicate()
        assert "it ran" not in output
        assert re.search("[Aa]uthenticat", output), output
        assert intruder.returncode != 0


# ---- the end; no test may follow


def test_running_requests_finish_and_new_ones_are_sent_away(server):
    wait_until_idle(server)
    lines = []
    streaming = threading.Event()
    body = LONG | {"max_tokens": 800}  # some seconds more than until new ones are sent away

    def read():
        with httpx.stream("POST", server.url + "/v1/completions", json=body, headers=AUTH, timeout=120) as response:
            for line in response.iter_lines():
                lines.append(line)
                streaming.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert streaming.wait(30)
    server.process.send_signal(signal.SIGTERM)
    statuses = []
    while reader.is_alive() and 503 not in statuses:
        response = httpx.post(server.url + "/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers=AUTH)
        statuses.append(response.status_code)
        time.sleep(0.1)
    assert statuses[-1] == 503
    assert set(statuses) <= {200, 503}
    assert response.headers["retry-after"] == "2"
    assert "shutting down" in response.json()["error"]["message"]
    reader.join(90)
    assert [line for line in lines if line][-1] == "data: [DONE]"
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert server.process.wait(60) == 0
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port), timeout=5)
