"""The node provider and the guide of the tests with several hosts, as far as that takes no hosts."""

import subprocess

import pytest
from support import guide
from support.host_provider import HostProvider, Supervisor


class StandInHosts:
    """Notes what a supervisor has it do."""

    def __init__(self):
        self.numbers = {}

    def start(self, name, number):
        self.numbers[name] = number

    def stop(self, name):
        del self.numbers[name]

    def __getitem__(self, name):
        return type("Host", (), {"ip": f"10.0.0.{self.numbers[name]}"})


@pytest.fixture
def hosts():
    return StandInHosts()


@pytest.fixture
def provider(hosts):
    supervisor = Supervisor(hosts, "127.0.0.1")
    yield HostProvider({"supervisor": supervisor.address}, "a cluster")
    supervisor.close()


def test_hosts_are_made_tagged_and_ended(provider, hosts):
    provider.create_node({}, {"kind": "worker"}, 2)
    provider.create_node({}, {"kind": "head"}, 1)
    assert provider.non_terminated_nodes({"kind": "worker"}) == ["n1", "n2"]
    provider.set_node_tags("n2", {"status": "up"})
    assert provider.node_tags("n2") == {"kind": "worker", "status": "up"}
    assert provider.internal_ip("n3") == provider.external_ip("n3") == "10.0.0.3"
    provider.terminate_node("n1")
    assert provider.is_terminated("n1")
    assert provider.is_running("n2")
    assert hosts.numbers == {"n2": 2, "n3": 3}


def test_a_number_is_not_used_twice(provider):
    provider.create_node({}, {}, 1)
    provider.terminate_node("n1")
    provider.create_node({}, {}, 1)
    assert provider.non_terminated_nodes({}) == ["n2"]


@pytest.mark.parametrize("section", [guide.FIRST, "## Machines of your own", "## AWS"])
def test_the_guides_scripts_are_bash(section):
    scripts = guide.scripts(section)
    assert len(scripts) >= 2
    for script in scripts:
        subprocess.run(["bash", "-n", "-c", script], check=True, timeout=10)


def test_an_empty_line_ends_a_script():
    first, *_, down = guide.scripts("## AWS")
    assert first == "pip install boto3\nray up --yes cluster.yaml"
    assert down == "ray down --yes cluster.yaml"
