"""cluster.yaml passes Ray's own checks, as it is and in its commented variant for own machines."""

from copy import deepcopy

import pytest
from ray.autoscaler._private.util import prepare_config, validate_config
from support import cluster_file


@pytest.fixture
def cluster():
    return cluster_file.cloud()


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
    config = prepare_config(cluster_file.own_machines())
    validate_config(config)
    assert config["provider"]["type"] == "local"
    assert config["max_workers"] == len(config["provider"]["worker_ips"]) == 2
    ours, start = config["head_start_ray_commands"][-1], cluster["head_start_ray_commands"][-1]
    assert ours == f"RAY_enable_autoscaler_v2=0 {start}", "the local provider starts one worker only with version 2"


def test_test_hosts_run_what_it_says(cluster):
    """What scripts/test-hosts executes passes Ray's checks, and has the file's own commands and mounts."""
    config = cluster_file.for_test_hosts("10.0.0.254:1")
    validate_config(prepare_config(deepcopy(config)))
    same = cluster.keys() - {"provider", "docker", "auth", "available_node_types"}
    assert {name: config[name] for name in same} == {name: cluster[name] for name in same}
    assert config["available_node_types"].keys() == cluster["available_node_types"].keys()


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
