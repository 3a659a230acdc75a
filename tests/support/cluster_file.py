"""cluster.yaml as it is, in its variant for own machines, and for test hosts in place of AWS's."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).parents[2] / "cluster.yaml"
OWN_MACHINES = "# On your own machines:"


def cloud() -> dict[str, Any]:
    """The file."""
    return yaml.safe_load(FILE.read_text())


def own_machines() -> dict[str, Any]:
    """The file with the sections of its last comment in place of the cloud's."""
    lines = [line[1:].removeprefix(" ") for line in FILE.read_text().split(OWN_MACHINES)[1].splitlines()[1:]]
    start = next(i for i, line in enumerate(lines) if line.startswith("provider:"))
    kept = {k: v for k, v in cloud().items() if k not in ("docker", "head_node_type", "available_node_types")}
    return kept | yaml.safe_load("\n".join(lines[start:]))


def use_clone(config: dict[str, Any]) -> None:
    """Have hosts use the clone where it lies. To install it takes a host seconds; tests of the file itself do that."""
    _, *others = config["setup_commands"]
    use = "echo 'export PYTHONPATH=~/rayllm:~/rayllm/kernels:$PYTHONPATH' >> ~/.bashrc"
    config["setup_commands"] = [use, *others]


def look_often(config: dict[str, Any]) -> None:
    """Have the autoscaler look every second, not every five, what is wanted: hosts come and go all the time here."""
    *others, start = config["head_start_ray_commands"]
    config["head_start_ray_commands"] = [*others, f"AUTOSCALER_UPDATE_INTERVAL_S=1 {start}"]


def for_test_hosts(supervisor: str, cpus: float = 1.0, **changes: Any) -> dict[str, Any]:
    """The file for a node provider whose hosts are namespaces. What differs from AWS:

    - the provider, and the key to log in with, which AWS makes itself;
    - no docker section: Python, Ray and CUDA's libraries are those of the test;
    - instance types, of which these hosts have none. A worker counts as having the GPUs of its type, and so many cpus;
    - an external provider has no defaults, so four options that the schema wants are there, and empty.

    supervisor: address of a `host_provider.Supervisor`. changes: other sections.
    """
    config = deepcopy(cloud())
    del config["docker"]
    config["provider"] = {"type": "external", "module": "host_provider.HostProvider", "supervisor": supervisor}
    config["auth"]["ssh_private_key"] = "~/.ssh/id_ed25519"
    for node in config["available_node_types"].values():
        node["node_config"] = {}
        if "GPU" in node["resources"]:
            node["resources"]["CPU"] = cpus
    no_defaults = ("initialization_commands", "head_setup_commands", "worker_setup_commands", "cluster_synced_files")
    return {**config, **{name: [] for name in no_defaults}, "file_mounts_sync_continuously": False, **changes}
