"""docs/cluster.md and cluster.yaml, followed on hosts that are there: `provider: local`."""

from __future__ import annotations

import json
import re
import time

import pytest
import yaml
from support import cluster_file, guide
from support.hosts import VENV
from support.ray_hosts import check_private, engines, processes, wait_for

pytestmark = pytest.mark.timeout(600)  # for machines without a free core

# What differs from what the guide says. All else runs as it stands there.
SUBSTITUTIONS = {
    # Hosts have these programs, and an environment with all packages, and no way to the internet.
    "sudo apt-get install --yes python3-venv rsync tmux curl": "command -v rsync tmux curl",
    "python3 -m venv ~/venv": f"ln -s {VENV} ~/venv",
    # The KV cache of 1 GiB a replica that CPUs get is more than the test needs.
    "--device cpu": "--device cpu --num-gpu-blocks-override 2000",
}


@pytest.fixture(scope="module")
def follow(hosts, laptop):
    """Run the guide's scripts, up to and with the one that has a text; returns what that said."""
    for name, number in (("head", 1), ("w2", 2), ("w3", 3)):
        hosts.start(name, number)
    laptop.path("rayllm/own.yaml").write_text(yaml.safe_dump(cluster_file.own_machines(), sort_keys=False))
    scripts = [*guide.scripts(guide.FIRST), *guide.scripts("## Machines of your own")]

    def follow(text):
        while True:
            script = scripts.pop(0)
            said = laptop.run("cd ~/rayllm\n" + guide.substituted(script, SUBSTITUTIONS), timeout=180)
            if text in script:
                return said

    follow.scripts = scripts
    return follow


def test_the_guide(follow, hosts, laptop, phases):
    with phases.timed("machines are prepared"):
        follow("for host in")
    assert hosts["w3"].run("command -v pip").strip() == "/run/home/venv/bin/pip"

    with phases.timed("ray up"):
        follow("ray up")
    start = time.monotonic()  # the workers come by themselves from now on
    follow("ray status")
    wait_for(lambda: all("raylet" in processes(hosts[name]) for name in ("w2", "w3")), "workers have no Ray", 120)
    while (said := laptop.run("cd ~/rayllm; ray exec own.yaml 'ray status'")) and "3 local.cluster.node" not in said:
        assert time.monotonic() - start < 120, said
    phases.add("both workers are there", time.monotonic() - start)
    for name in ("head", "w2", "w3"):
        check_private(hosts[name])
        where = hosts[name].run("cd /; python -c 'import rayllm; print(rayllm.__file__)'")
        assert "/site-packages/rayllm/" in where, "the setup commands did not install the clone"

    with phases.timed("the model answers"):
        follow("rayllm launch")
    said = follow("curl")
    answer, end = json.JSONDecoder().raw_decode(said)
    assert 1 <= answer["usage"]["completion_tokens"] <= 16  # sampled, so it may end by itself
    assert [each["id"] for each in json.loads(said[end:])["data"]] == ["tiny-pydoc"]
    for name in ("w2", "w3"):
        assert len(engines(hosts[name])) == 1, processes(hosts[name])

    with phases.timed("launch, Ray and workers stop"):
        follow("ray down")
    for name in ("head", "w2", "w3"):
        assert not re.search("raylet|gcs_server|ray::", processes(hosts[name])), "Ray still runs"
    assert not follow.scripts, "commands of the guide that were not run"
