"""What `rayllm launch` starts, waits for, watches and ends, and its deadlines. Serve is a stand-in; no Ray."""

from __future__ import annotations

import contextlib
import logging
import re
import resource
import socket
import threading
import time
from types import SimpleNamespace

import pytest
from ray.exceptions import RayTaskError
from support.serve import LocalDirectory, engine_member

from rayllm import timeouts
from rayllm.config.options import EngineConfig, ModelConfig, ServerConfig
from rayllm.errors import ConfigError, EngineDeadError, ModelError, StartupError
from rayllm.serve.cluster import launch as module
from rayllm.serve.cluster.directory import ServerMember
from rayllm.serve.cluster.launch import Deployment, Status, allow_files, key_warnings, listen, startup_error, watch
from rayllm.serve.cluster.processes import Orders

BROKEN = "A replica failed to start with exception. Error:\nrayllm.errors.ModelError: weights are broken\n"
MODEL = ModelConfig(EngineConfig(device="cpu"), ServerConfig())
SLOW = "Deployment 'engine-a' has 1 replicas that have taken more than 30s to initialize.\nThis may be caused by ..."


@pytest.fixture(autouse=True)
def _other_tests_keep_their_ray(monkeypatch):
    monkeypatch.setattr(module.ray, "shutdown", lambda: None)


def app(status, message="", engine=""):
    return SimpleNamespace(
        status=SimpleNamespace(value=status), message=message, deployments={"engine-a": SimpleNamespace(message=engine)}
    )


def deployment(*apps, directory=None, **server):
    """A Deployment whose application is these one after the other, the last one for ever; None is none."""
    left = list(apps)

    def applications():
        found = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(found, Exception):
            raise found
        return {} if found is None else {"rayllm": found}

    return Deployment(ServerConfig(**server), directory or LocalDirectory(), applications)


def wait(found, timeout=5.0, stop=None):
    """(whether it runs, notes)."""
    notes = []
    return found.wait_until_running(stop or threading.Event(), notes.append, timeout), notes


# ---- the start


def test_a_wrong_adapter_is_named_before_anything_starts(monkeypatch):
    def nothing_starts(*_arguments):
        raise AssertionError("started")

    monkeypatch.setattr(module, "supervise", nothing_starts)
    adapters = EngineConfig(device="cpu", enable_lora=True, lora_modules={"x": "/no/such/adapter"})
    model = ModelConfig(adapters, ServerConfig())
    with pytest.raises(ModelError, match=r"^lora_modules: x: adapter folder /no/such/adapter does not exist$"):
        module.start_server([model], ServerConfig(), on_ready=print, report=print)


def test_it_waits_and_says_what_takes_long():
    slow = app("DEPLOYING", engine=SLOW)
    assert wait(deployment(app("DEPLOYING"), slow, slow, app("RUNNING"))) == (True, [SLOW.splitlines()[0]])


def test_it_waits_no_longer_than_it_may():
    started = time.monotonic()
    with pytest.raises(StartupError, match=r"not up after 0.3 s: Deployment 'engine-a' has 1 replicas .* initialize"):
        wait(deployment(app("DEPLOYING", engine=SLOW)), timeout=0.3)
    assert time.monotonic() - started < 2


def test_a_stop_breaks_the_wait_off():
    stop = threading.Event()
    threading.Timer(0.2, stop.set).start()
    assert wait(deployment(app("DEPLOYING")), 30, stop) == (False, [])


def test_an_error_of_a_replica_ends_the_wait():
    with pytest.raises(ModelError, match="weights are broken"):
        wait(deployment(app("DEPLOYING"), app("DEPLOYING", engine=BROKEN)))
    with pytest.raises(StartupError, match="no such image"):
        wait(deployment(app("DEPLOY_FAILED", "Failed.\nno such image")))
    with pytest.raises(EngineDeadError, match="Ray is gone: lost"):
        wait(deployment(app("DEPLOYING"), ConnectionError("lost")))


@pytest.mark.parametrize(
    ("line", "kind", "text"),
    [
        ("rayllm.errors.ModelError: weights are broken", ModelError, "weights are broken"),
        ("rayllm.errors.ConfigError: max_model_len 9 is too long", ConfigError, "max_model_len 9 is too long"),
        ("rayllm.errors.StartupError: rank 1 died", StartupError, "rank 1 died"),
        ("RuntimeError: boom", StartupError, "RuntimeError: boom (Ray's logs"),
    ],
)
def test_errors_of_a_replica_keep_class_and_text(line, kind, text):
    message = (
        "A replica failed to start with exception. Retrying 0 more time(s). Error:\n"
        "Traceback (most recent call last):\n"
        f'  File "replica.py", line 1, in initialize\n    raise\n{line}\n'
    )
    error = startup_error(message)
    assert type(error) is kind
    assert text in str(error)


def test_other_status_messages_are_no_errors():
    assert startup_error("") is None
    assert startup_error(SLOW) is None


def test_the_status_says_why():
    failed = app("DEPLOY_FAILED", "Failed to update the deployments ['engine-a'].", BROKEN)
    name, error, why = deployment(failed).status()
    assert (name, type(error), why) == ("DEPLOY_FAILED", ModelError, "weights are broken")
    assert deployment(app("UNHEALTHY", "one\ntwo\n")).status() == Status("UNHEALTHY", None, "two")
    with pytest.raises(EngineDeadError, match="removed"):
        deployment(None).status()


# ---- ports, ingress, updates


def test_ports(monkeypatch):
    monkeypatch.setattr(module, "has_no_cluster", lambda: True)  # others' tests may have one on this machine
    with listen(ServerConfig(port=0)) as listener:
        port = listener.getsockname()[1]
        message = rf"^cannot listen on 127\.0\.0\.1 port {port}: Address already in use$"
        with pytest.raises(ConfigError, match=message):
            listen(ServerConfig(port=port))
        with pytest.raises(ConfigError, match=message):  # before it starts Ray
            deployment(None, port=port, ingress="haproxy").join([MODEL], lambda _: None)
    with pytest.raises(ConfigError, match="cannot listen on 203"):
        listen(ServerConfig(host="203.0.113.9"))
    with pytest.raises(ConfigError, match="cannot listen on a b port"):
        listen(ServerConfig(host="a b"))


def test_the_port_of_ray_serves_proxy_is_held_until_the_end(monkeypatch):
    """The proxy listens once Ray is up; until then no connection that is made here may be given the port."""
    monkeypatch.setattr(module, "has_no_cluster", lambda: True)
    monkeypatch.setattr(module, "connect_to_ray", lambda _starts_one: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = deployment(None, ingress="serve", port=0)
    found.join([MODEL], lambda _: None)
    where = ("127.0.0.1", found._server.port)
    with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
        other.bind(where)
    with socket.socket() as proxy:  # as Ray Serve makes it (tests/e2e/test_server_starts.py starts one)
        proxy.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        proxy.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        proxy.bind(where)
        proxy.listen()
        with socket.create_connection(where):
            proxy.accept()[0].close()
    found.leave()
    with socket.create_server(where):
        pass


def test_a_serve_that_does_not_start_is_one_error(monkeypatch, caplog):
    caplog.set_level(logging.WARNING, "ray.serve")  # which `start` changes, and this takes back at the end

    def start(**_):
        raise RayTaskError("ready", "ray::ProxyActor\nRuntimeError: Failed to bind to address '127.0.0.1:81'.", None)

    monkeypatch.setattr(module.serve, "start", start)
    monkeypatch.setattr(module.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "node"))
    found = deployment(None, ingress="serve", port=81)
    found._owned = True
    monkeypatch.setattr(found, "_resolved", lambda _models: [])
    with pytest.raises(StartupError, match=r"^Ray Serve cannot be started: RuntimeError: Failed to bind to .*:81'\.$"):
        found.start([MODEL], [], lambda _: None)


@pytest.mark.parametrize(
    ("wanted", "limits", "soft", "note"),
    [
        (1500, (1100, 2000), 1500, None),
        (1500, (1800, 2000), 1800, None),
        (3000, (1100, 2000), 2000, r"^the limit of open files \(ulimit -Hn\) is 2,000; .* 3,000 are needed$"),
    ],
)
def test_the_soft_limit_of_open_files_is_raised(monkeypatch, wanted, limits, soft, note):
    found = [limits]
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: found[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _kind, both: found.append(both))
    said = allow_files(wanted)
    assert found[-1] == (soft, limits[1])
    assert said is None if note is None else re.match(note, said)


def test_a_limit_of_open_files_that_is_too_low(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (256, 256))
    with pytest.raises(ConfigError, match=r"the limit of open files \(ulimit -Hn\) is 256; at least 1,024 are"):
        allow_files(10_000)


@pytest.mark.parametrize(
    ("ingress", "is_there", "starts_ray", "said"),
    [
        ("auto", True, True, 0),
        ("auto", False, True, 1),
        ("auto", False, False, 1),
        ("auto", True, False, 0),
        ("serve", False, True, 0),
    ],
)
def test_it_says_if_haproxy_is_missing(monkeypatch, ingress, is_there, starts_ray, said):
    notes = []
    monkeypatch.setattr(module, "haproxy_binary", lambda: "haproxy" if is_there else None)
    monkeypatch.setattr(module, "has_no_cluster", lambda: starts_ray)
    monkeypatch.setattr(module, "connect_to_ray", lambda _starts_one: None)
    started = []
    monkeypatch.setattr(
        module,
        "Ingress",
        lambda _server, listener, _max: SimpleNamespace(start=lambda: started.append(1), stop=listener.close),
    )
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = deployment(None, ingress=ingress, port=0)
    found.join([MODEL], notes.append)
    found.leave()
    assert len(notes) == said
    assert len(started) == (ingress == "auto" and is_there and starts_ray)


@pytest.mark.parametrize("options", [{"port": 81}, {"host": "::"}, {"ingress": "serve"}, {"ssl_certfile": "x.pem"}])
def test_an_update_cannot_move_the_server(options):
    found = deployment(app("RUNNING"), port=80, ingress="haproxy")
    with pytest.raises(ConfigError, match=f"{next(iter(options))} cannot change from .* while the server runs"):
        found.update([], ServerConfig(**{"port": 80, "ingress": "haproxy", **options}), [])


def test_an_application_has_one_launch(monkeypatch):
    """One that was killed leaves the application behind, for the next one to take over."""
    monkeypatch.setattr(timeouts, "MEMBER_SILENCE_S", 0.3)
    directory = LocalDirectory()
    first, second = deployment(app("RUNNING"), directory=directory), deployment(app("RUNNING"), directory=directory)
    wait(first)
    alive = threading.Event()

    def beat():
        while not alive.wait(0.05):
            first.watch_ingress()

    thread = threading.Thread(target=beat)
    thread.start()
    with pytest.raises(ConfigError, match="serves an application 'rayllm' already, of another rayllm launch"):
        second._wait_for_other_launch()
    alive.set()
    thread.join()
    second._wait_for_other_launch()
    assert not directory.ask().launches


def test_one_that_was_taken_over_outlives_a_launch_that_failed():
    ended = []
    for status in ("RUNNING", "DEPLOY_FAILED"):
        found = deployment(app("DEPLOYING"), app(status))
        found._end_application = lambda status=status: ended.append(status)
        with contextlib.suppress(StartupError):
            wait(found)
        found.leave()
    assert ended == ["RUNNING"]


# ---- the end


def leave(members, drain_timeout, then=lambda _directory: None):
    """(seconds that it took, seconds that members were given) for one that ran."""
    directory = LocalDirectory()
    for member in members:
        directory.ask(member)
    found = deployment(app("RUNNING"), directory=directory, drain_timeout=drain_timeout)
    wait(found)
    then(directory)
    started = time.monotonic()
    found.leave()
    return time.monotonic() - started, directory.ask().stop_in


def test_it_waits_for_members_to_leave_and_no_longer(monkeypatch):
    monkeypatch.setattr(timeouts, "STOP_S", 0.5)
    stays = engine_member("one")
    seconds, given = leave([stays], 0.5)
    assert 1 < seconds < 3 and given is not None

    def leaves(directory):
        threading.Timer(0.3, directory.directory.leave, ["one"]).start()

    seconds, given = leave([stays], 60, leaves)
    assert seconds < 5 and 50 < given <= 60
    assert leave([ServerMember("behind Serve's proxies", "here")], 60)[0] < 1, "they end with Ray"

    def is_replaced(directory):
        leaves(directory)
        threading.Timer(0.1, directory.ask, [engine_member("its successor")]).start()

    assert leave([stays], 60, is_replaced)[0] < 5, "who came since has no requests"


def test_one_that_never_ran_is_not_waited_for():
    directory = LocalDirectory()
    directory.ask(engine_member("one"))
    deployment(app("DEPLOYING"), directory=directory).leave()
    assert directory.ask().stop_in is None


# ---- while it runs


class FakeDeployment:
    """Has these statuses one after the other; after the last one somebody sends SIGTERM."""

    def __init__(self, orders, statuses):
        self._orders, self._left = orders, list(statuses)
        self.looks = 0
        self.kept, self.went_back = 0, 0

    def keep(self):
        self.kept += 1

    def go_back(self):
        self.went_back += 1

    def watch_ingress(self):
        self.looks += 1

    def status(self):
        found = self._left.pop(0)
        if isinstance(found, Exception):
            raise found
        if not self._left:
            self._orders.stop.set()
        return Status(found[0], None, found[1])


def watched(statuses, update=lambda: None, told=True):
    """What it reports; told: an update was asked for before."""
    orders, said = Orders(threading.Event(), threading.Event()), []
    if told:
        orders.update.set()
    deployment = FakeDeployment(orders, statuses)
    watch(deployment, orders, said.append, update, status_s=0)
    assert deployment.looks >= len(statuses)
    assert deployment.kept == said.count("updated")
    assert deployment.went_back == sum("update failed" in each for each in said)
    return said


def test_an_update_is_reported():
    done = []
    assert watched([("RUNNING", ""), ("RUNNING", "")], lambda: done.append(1)) == ["updating", "updated"]
    assert done == [1]
    statuses = [("DEPLOYING", ""), ("DEPLOYING", ""), ("DEPLOY_FAILED", "weights are broken"), ("UNHEALTHY", "x")]
    assert watched(statuses) == [
        "updating",
        "the server is DEPLOYING",
        "the server is DEPLOY_FAILED: weights are broken",
        "the update failed; the replicas that there were go on",
        "the server is UNHEALTHY: x",
    ]


@pytest.mark.parametrize("error", [ConfigError("port cannot change"), ModelError("no weights"), StartupError("no")])
def test_options_that_cannot_work_leave_the_server_as_it_is(error):
    def update():
        raise error

    assert watched([("RUNNING", "")], update) == [f"the options stay as they are: {error}"]


def test_changes_of_the_status_are_reported_once():
    statuses = [("RUNNING", ""), ("UNHEALTHY", "x"), ("UNHEALTHY", "y"), ("RUNNING", "")]
    assert watched(statuses, told=False) == ["the server is UNHEALTHY: x", "the server is RUNNING"]


def test_a_ray_that_is_gone_ends_it():
    with pytest.raises(EngineDeadError, match="Ray is gone"):
        watched([("RUNNING", ""), EngineDeadError("Ray is gone: lost")], told=False)


def test_keys_that_others_can_see_and_hosts_that_others_reach():
    assert "--api-key-file" in key_warnings(ServerConfig(api_key="x"), has_keys=True)[0]
    assert "whoever reaches 0.0.0.0" in key_warnings(ServerConfig(host="0.0.0.0"), has_keys=False)[0]
    assert (
        key_warnings(ServerConfig(host="0.0.0.0"), has_keys=True) == key_warnings(ServerConfig(), has_keys=False) == []
    )
