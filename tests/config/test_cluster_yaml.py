"""cluster.yaml passes Ray's own checks, as it is and in its commented variant for own machines."""

from copy import deepcopy
from pathlib import Path

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

ROOT = Path(__file__).parents[2]
FILE = ROOT / "cluster.yaml"


@pytest.fixture
def cluster():
    return yaml.safe_load(FILE.read_text())


def on_premise(cluster):
    """The file with the sections of its last comment in place of the cloud's."""
    comment = FILE.read_text().split("# On your own machines:")[1]
    lines = [line.removeprefix("# ") for line in comment.splitlines() if line.startswith("# ")]
    start = next(i for i, line in enumerate(lines) if line.startswith("provider:"))
    kept = {k: v for k, v in cluster.items() if k not in ("docker", "head_node_type", "available_node_types")}
    return kept | yaml.safe_load("\n".join(lines[start:]))


def test_ray_accepts_it(cluster):
    config = prepare_config(deepcopy(cluster))
    validate_config(config)
    types = config["available_node_types"]
    assert config["provider"]["type"] == "aws"
    assert sum(t["min_workers"] for n, t in types.items() if n != "head") <= cluster["max_workers"]
    for name, node in types.items():
        if name != "head":
            assert node["resources"]["GPU"] >= 1
            assert node["min_workers"] <= node["max_workers"]


def test_ray_accepts_the_variant_for_own_machines(cluster):
    config = prepare_config(on_premise(cluster))
    validate_config(config)
    assert config["provider"]["type"] == "local"
    assert config["max_workers"] == len(config["provider"]["worker_ips"]) == 2
    ours, start = config["head_start_ray_commands"][-1], cluster["head_start_ray_commands"][-1]
    assert ours == f"RAY_enable_autoscaler_v2=0 {start}", "the local provider starts one worker only with version 2"


def test_a_misspelt_key_would_be_found(cluster):
    import jsonschema

    with pytest.raises(jsonschema.ValidationError):
        validate_config(prepare_config(cluster | {"idle_timeout": 3}))


def test_nothing_is_open_to_the_network(cluster):
    """The dashboard stays on loopback, every node asks for the token, nodes install this package."""
    commands = cluster["head_start_ray_commands"] + cluster["worker_start_ray_commands"]
    assert any("--dashboard-host=127.0.0.1" in c for c in commands)
    assert any("--disable-usage-stats" in c for c in commands)
    assert not any("0.0.0.0" in c or "--dashboard-host=0" in c for c in commands)
    setup = " ".join(cluster["setup_commands"])
    assert "RAY_AUTH_MODE=token" in setup
    assert "chmod 600 ~/.ray/auth_token" in setup
    assert "pip install" in setup
    assert "~/rayllm" in setup
    assert cluster["file_mounts"]["~/rayllm"] == "."
