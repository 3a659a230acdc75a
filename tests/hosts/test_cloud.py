"""docs/cluster.md on AWS and cluster.yaml as it is, with hosts made of namespaces in place of AWS's machines."""

from __future__ import annotations

import json
import re
import subprocess

import pytest
import yaml
from support import cluster_file, guide
from support.hosts import VENV
from support.ray_hosts import check_private, engines, processes, wait_for

pytestmark = pytest.mark.timeout(600)  # for machines without a free core

IDLE_MINUTES = 0.1
NOT_COPIED = (".git", ".venv", "tests/__pycache__", "build")

# What differs from what the guide says; `cluster_file.for_test_hosts` says what differs from cluster.yaml.
SUBSTITUTIONS = {
    "python3 -m venv ~/venv": f"ln -s {VENV} ~/venv",  # with all packages, as there is no way to the internet
    "pip install boto3\n": "",
    "tiny-pydoc.yaml'": "tiny-pydoc.yaml --device cpu --num-gpu-blocks-override 2000'",  # there are no GPUs
}


@pytest.fixture(scope="module")
def scripts(laptop, supervisor):
    """The guide's, in order; cluster.yaml on the laptop is one for test hosts."""
    config = cluster_file.for_test_hosts(supervisor.address, idle_timeout_minutes=IDLE_MINUTES)
    laptop.path("rayllm/cluster.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    laptop.run(
        f"cd ~/rayllm; mkdir -p {' '.join(NOT_COPIED)}; for each in {' '.join(NOT_COPIED)}; do date > $each/x; done"
    )
    return [guide.substituted(each, SUBSTITUTIONS) for each in [*guide.scripts(guide.FIRST), *guide.scripts("## AWS")]]


def run(laptop, scripts, text, limit=120):
    """Run the guide's scripts, up to and with the first that has a text; returns what that said."""
    while True:
        script = scripts.pop(0)
        said = laptop.run(f"cd ~/rayllm\n{script}", timeout=limit)
        if text in script:
            return said


def test_cluster_yaml(scripts, hosts, laptop, supervisor, phases):
    with phases.timed("ray up"):
        run(laptop, scripts, "ray up")
    is_up = {"ray-node-status": "up-to-date"}
    phases.add("the worker of min_workers", wait_for(lambda: len(supervisor.nodes(is_up)) == 2, supervisor.nodes({})))
    head, worker = hosts["n1"], hosts["n2"]
    assert supervisor.nodes({"ray-user-node-type": "gpu-1"}) == ["n2"]
    for host in (head, worker):
        check_private(host)
        where = host.run("cd /; python -c 'import rayllm; print(rayllm.__file__)'")
        assert "/site-packages/rayllm/" in where, "the setup commands did not install the clone"
        assert (
            host.run(f"cd ~/rayllm; ls -d {' '.join(f'{each}/x' for each in NOT_COPIED)} 2> /dev/null", check=False)
            == ""
        )

    with phases.timed("the model answers"):
        run(laptop, scripts, "rayllm launch", 180)
        said = run(laptop, scripts, "ray exec") if "/health" in scripts[0] else ""
    assert len(engines(worker)) == 1, processes(worker) + said
    assert engines(head) == []

    # `ray attach` as in a terminal: it goes on until it is told to exit.
    attach = laptop.start(f"cd ~/rayllm\n{scripts.pop(0)}", stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    wait_for(lambda: "LISTEN" in laptop.run("ss -tlnH 'sport = 8000'"), "ray attach -p has no port")
    answer = json.loads(run(laptop, scripts, "curl"))
    assert 1 <= answer["usage"]["completion_tokens"] <= 16  # sampled, so it may end by itself
    attach.communicate(b"exit\n", timeout=20)

    # More than the workers have: the autoscaler makes what is asked for, and takes it away when nobody wants it.
    ask = "import ray; ray.init(); from ray.autoscaler.sdk import request_resources; request_resources(bundles={})"
    head.run(f"python -c '{ask.format(json.dumps([{'GPU': 1}, {'GPU': 1}]))}'")
    phases.add("one worker more", wait_for(lambda: len(supervisor.nodes(is_up)) == 3, supervisor.history))
    head.run(f"python -c '{ask.format([])}'")
    left = wait_for(lambda: len(supervisor.nodes({})) == 2, supervisor.history, IDLE_MINUTES * 60 + 60)
    phases.add(f"and back, {IDLE_MINUTES * 60:g} s of idleness included", left)
    assert supervisor.nodes({"ray-user-node-type": "gpu-1"}) == ["n2"], "the worker with the replica had to stay"
    assert engines(worker)

    with phases.timed("ray down"):
        run(laptop, scripts, "ray down")
    assert supervisor.nodes({}) == []
    assert hosts.names() == ["laptop"]
    assert not scripts, "commands of the guide that were not run"
    assert re.search("ray::|raylet", processes(laptop)) is None
