"""How `rayllm launch` watches what it has started: status, updates, the end."""

from __future__ import annotations

import threading

import pytest

from rayllm.config.options import ServerConfig
from rayllm.errors import ConfigError, EngineDeadError, ModelError, StartupError
from rayllm.serve.cluster.deployment import Status
from rayllm.serve.cluster.launch import key_warnings, watch
from rayllm.serve.cluster.processes import Orders


class FakeDeployment:
    """Has these statuses one after the other; after the last one somebody sends SIGTERM."""

    def __init__(self, orders, statuses):
        self._orders, self._left = orders, list(statuses)
        self.looks = 0

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
