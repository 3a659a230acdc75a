"""Finding a Ray cluster or starting one: its token, and what a cluster of ours has."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from support.processes import is_running

from rayllm.errors import StartupError
from rayllm.executor import ray_cluster
from rayllm.executor.ray_cluster import ensure_token


def test_the_token_is_made_once_and_private(tmp_path):
    path = tmp_path / "home" / ".ray" / "auth_token"
    ensure_token(path)
    token = path.read_text()
    assert len(token) == 64
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)
    ensure_token(path)
    assert path.read_text() == token
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match="cannot be made"):
        ensure_token(tmp_path / "file" / "auth_token")


@pytest.mark.parametrize("variable", [None, "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"])
def test_a_cluster_of_ours_has_a_token_and_no_dashboard(monkeypatch, variable):
    asked = {}
    made = []
    monkeypatch.delenv("RAY_task_events_report_interval_ms", raising=False)
    monkeypatch.setattr(ray_cluster.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray_cluster.ray, "init", lambda **options: asked.update(options))
    monkeypatch.setattr(ray_cluster, "has_no_cluster", lambda: True)
    monkeypatch.setattr(ray_cluster, "ensure_token", made.append)
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv(variable, "x")
    assert ray_cluster.connect_to_ray() is True
    assert (asked["address"], asked["include_dashboard"]) == ("local", False)
    assert len(made) == (variable is None)
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
    assert os.environ["RAY_enable_metrics_collection"] == "0"  # noqa: SIM112  (Ray spells it so)
    assert os.environ["RAY_task_events_report_interval_ms"] == "0"  # noqa: SIM112


@pytest.mark.parametrize("is_ours", [True, False])
def test_files_of_a_cluster_of_ours_are_private(monkeypatch, tmp_path, is_ours):
    """Ray opens its own folders to everybody; what its processes make inherits the umask."""
    seen = {}

    def init(**_options):
        seen.update(umask=os.umask(0o022), folder=os.environ.get("RAY_TMPDIR"))
        os.umask(seen["umask"])

    monkeypatch.setattr(ray_cluster.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray_cluster.ray, "init", init)
    monkeypatch.setattr(ray_cluster, "has_no_cluster", lambda: is_ours)
    monkeypatch.setattr(ray_cluster, "ensure_token", lambda _: None)
    monkeypatch.setattr(ray_cluster.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    before = os.umask(0o022)
    try:
        for _ in range(2):
            ray_cluster.connect_to_ray()
            folder = tmp_path / f"rayllm-{os.getuid()}"
            expected = {"umask": 0o077, "folder": str(folder)} if is_ours else {"umask": 0o022, "folder": None}
            assert seen == expected
            assert os.umask(0o022) == 0o022
            assert "RAY_TMPDIR" not in os.environ
        if is_ours:
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            folder.chmod(0o755)
            with pytest.raises(StartupError, match="must be a folder that only this user can enter"):
                ray_cluster.connect_to_ray()
            monkeypatch.setenv("RAY_TMPDIR", "/elsewhere")
            ray_cluster.connect_to_ray()
            assert seen["folder"] == os.environ["RAY_TMPDIR"] == "/elsewhere"
    finally:
        os.umask(before)


@pytest.mark.parametrize(("text", "starts"), [("... node timed out during startup.", 2), ("no room", 1)])
def test_a_node_that_is_not_up_in_time_is_started_once_more(monkeypatch, text, starts):
    """And nothing is left of what has failed, nor is anything else ended."""
    ours = []
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as other:

        def init(**_options):
            ours.append(subprocess.Popen([*command, str(Path(ray.__file__).with_name("x"))], stdin=subprocess.PIPE))
            raise RuntimeError(f"The current{text[3:]}" if starts == 2 else text)

        monkeypatch.setattr(ray_cluster.ray, "is_initialized", lambda: False)
        monkeypatch.setattr(ray_cluster.ray, "init", init)
        monkeypatch.setattr(ray_cluster, "has_no_cluster", lambda: True)
        monkeypatch.setattr(ray_cluster, "ensure_token", lambda _: None)
        with pytest.raises(StartupError, match=f"Ray cannot be started or reached: .*{text[4:]}"):
            ray_cluster.connect_to_ray()
        assert len(ours) == starts
        assert not any(is_running(each.pid) for each in ours)
        assert other.poll() is None
        other.communicate(b"\n")


JOIN = """
from rayllm.errors import StartupError
from rayllm.executor.ray_cluster import connect_to_ray
try:
    connect_to_ray()
except StartupError as error:
    print(error)
"""


@pytest.mark.parametrize(
    "auth", [{"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "z" * 32}, {"RAY_AUTH_MODE": "disabled"}]
)
def test_a_cluster_with_another_token_is_one_error(ray_cluster, auth):
    """And not what Ray's own attempts say, once a second."""
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-c", JOIN]
    environment = {**os.environ, "RAY_ADDRESS": address, **auth}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.startswith(
        f"the Ray cluster at {address} wants another token than this process has: RAY_AUTH_MODE"
    )
    assert done.stderr == ""
