"""Several replicas and models under load: a replica that dies, a rolling update, autoscaling. Bundled model, CPU."""

from __future__ import annotations

import os
import re
import signal
import threading
import time

import httpx
import pytest
import yaml
from support.launched import Launched, free_port, session_processes

from rayllm import timeouts

LIMIT_S = 90  # of each wait; other tests may share the cores


class Deployment(Launched):
    """A launched server of the models "a" and "b", and its file."""

    def __init__(self, folder):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.file = folder / "deployment.yaml"
        self.a = {"served_model_name": "a", "num_replicas": 2}
        self.write()
        super().__init__(folder / "log", "--config", str(self.file))

    def write(self, **fields):
        """The file, with other options of model "a"."""
        self.a |= fields
        common = {"port": self.port, "device": "cpu", "max_num_seqs": 16, "num_gpu_blocks_override": 600}
        models = [self.a, {"served_model_name": "b", "max_model_len": 512}]
        self.file.write_text(yaml.safe_dump(common | {"models": models}))

    def update(self):
        """Have it read its file again; returns what it has to say in the end."""
        before = len(self.log.read_text())
        self.process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + LIMIT_S
        while not (found := re.search(r"rayllm: (updated|the update failed|the options stay.*)", self.said(before))):
            assert time.monotonic() < deadline, self.said(before)
            time.sleep(0.2)
        return found.group(1)

    def said(self, start):
        return self.log.read_text()[start:]

    def engines(self, model):
        """Ids of the processes of a model's replicas."""
        return {
            pid for pid, command in session_processes(self.session_id) if command.strip().endswith(f":engine-{model}")
        }

    def figures(self, name, model):
        """Label `engine` -> value."""
        text = httpx.get(self.url + "/metrics", timeout=30).text
        lines = re.findall(rf'^rayllm:{name}{{engine="(\w+)",model_name="{model}"}} (\S+)$', text, re.MULTILINE)
        return {engine: float(value) for engine, value in lines}

    def replicas(self, model):
        return self.figures("num_replicas", model)["all"]

    def complete(self, model="a", prompt="The for statement", client=httpx, **fields):
        body = {"model": model, "prompt": prompt, "max_tokens": 8, "ignore_eos": True} | fields
        return client.post(self.url + "/v1/completions", json=body, timeout=LIMIT_S)


class Traffic:
    """Clients that ask one thing after the other while it lasts. failed: (status, text) of what was not answered."""

    def __init__(self, server, model="a", clients=2, **fields):
        self.failed = []
        self.count = 0
        self._server, self._model, self._fields = server, model, fields
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(i,)) for i in range(clients)]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        for thread in self._threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive(), "a request hangs"

    def _ask(self, number):
        turn = 0
        with httpx.Client() as client:
            while not self._stop.is_set():
                turn += 1
                fields = {"prompt": f"Item {number} {turn}", "max_tokens": 24, "stream": turn % 2 == 0} | self._fields
                try:
                    answer = self._server.complete(self._model, client=client, **fields)
                except httpx.HTTPError as error:
                    self.failed.append((0, repr(error)))
                    continue
                complete = answer.text.endswith("data: [DONE]\n\n") or not fields["stream"]
                if answer.status_code != 200 or '{"error"' in answer.text or not complete:
                    self.failed.append((answer.status_code, answer.text[-300:]))
                self.count += 1
                time.sleep(0.05)  # the engines that start want some of the cores too


def wait_for(condition):
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    launched = Deployment(tmp_path_factory.mktemp("server"))
    try:
        launched.wait_for("\nready ")
        yield launched
    finally:
        launched.kill()


def test_models_are_told_apart(server):
    cards = httpx.get(server.url + "/v1/models").json()["data"]
    assert [(card["id"], card["max_model_len"]) for card in cards] == [("a", 2048), ("b", 512)]
    for name in "ab":
        before = {model: sum(server.figures("generation_tokens_total", model).values()) for model in "ab"}
        assert server.complete(name).json()["model"] == name
        time.sleep(2 * timeouts.BEAT_S)  # engines tell their figures so often
        for model in "ab":
            after = sum(server.figures("generation_tokens_total", model).values())
            assert after - before[model] == (8 if model == name else 0)
        assert httpx.get(server.url + f"/health?model={name}").json() == {"status": "ok"}
    unknown = server.complete("c")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert server.complete("b", max_tokens=600).status_code == 400
    assert set(server.figures("num_requests_running", "a")) == {"0", "1"}
    assert server.replicas("a") == 2


def test_a_prefix_is_computed_on_one_replica_only(server):
    texts = [f"Chapter {number}: " + "The for statement is used to iterate. " * 12 for number in range(6)]
    hits = sum(server.figures("prefix_cache_hits_total", "a").values())
    answers = [server.complete(prompt=text + str(turn), max_tokens=1).json() for turn in range(3) for text in texts]
    tokens = min(answer["usage"]["prompt_tokens"] for answer in answers)
    time.sleep(2 * timeouts.BEAT_S)
    hits = sum(server.figures("prefix_cache_hits_total", "a").values()) - hits
    assert hits > 12 * (tokens - 40), "all but the first of each would be found"
    assert all(server.figures("prompt_tokens_total", "a").values()), "both replicas had some"


def test_requests_of_a_replica_that_dies_go_on_on_the_other(server):
    before = server.engines("a")
    with Traffic(server) as traffic:
        wait_for(lambda: traffic.count > 4)
        victim = min(before)
        os.kill(victim, signal.SIGKILL)
        count = traffic.count
        wait_for(lambda: traffic.count > count + 4)
        wait_for(lambda: victim not in server.engines("a") and server.replicas("a") == 2)
    assert traffic.failed == []
    assert before & server.engines("a") == before - {victim}
    assert httpx.get(server.url + "/health").status_code == 200


def test_an_update_under_load_loses_no_request(server):
    """Model "a" gets other options and one replica fewer, while its old replicas still have a long request."""
    before_a, before_b = server.engines("a"), server.engines("b")
    long = {}

    def ask_for_long():
        long["answer"] = server.complete(prompt="A long story", max_tokens=300, stream=True)

    with Traffic(server) as traffic, Traffic(server, "b", clients=1) as other:
        thread = threading.Thread(target=ask_for_long)
        thread.start()
        wait_for(lambda: traffic.count > 4)
        server.write(
            num_replicas=1,
            max_num_seqs=8,
            max_replicas=2,
            target_queued_tokens=200,
            upscale_delay=0.5,
            downscale_delay=2,
        )
        assert server.update() == "updated"
        count = traffic.count
        wait_for(lambda: traffic.count > count + 8)
    thread.join(LIMIT_S)
    assert traffic.failed == other.failed == []
    assert long["answer"].text.endswith("data: [DONE]\n\n")
    assert '{"error"' not in long["answer"].text
    wait_for(lambda: not before_a & server.engines("a") and server.replicas("a") == len(server.engines("a")) == 1)
    assert server.engines("b") == before_b, "what did not change goes on"


def test_replicas_come_with_the_queue_and_go_with_it(server):
    """After the update before this, "a" may have 1 or 2."""
    long_prompt = "The for statement is used to iterate. " * 20
    with Traffic(server, clients=24, prompt=long_prompt) as traffic:
        wait_for(lambda: server.replicas("a") == 2)
    with Traffic(server, clients=1) as gentle:
        wait_for(lambda: server.replicas("a") == 1)
    assert traffic.failed == gentle.failed == []


def test_options_that_cannot_work_change_nothing(server):
    before = server.file.read_text()
    for text, message in (
        ("models: [{modle: x}]", "unknown option 'modle'"),
        (before.replace(f"port: {server.port}", "port: 1"), "port cannot change"),
        (before.replace("served_model_name: b", "model: /no/such"), "/no/such does not exist"),
    ):
        server.file.write_text(text)
        said = server.update()
        assert said.startswith("the options stay as they are"), said
        assert message in said
    assert server.complete("b").status_code == 200


# The last test that needs the server.
def test_nothing_is_left(server):
    assert server.stop() == 0, server.log.read_text()
