"""Tests with several hosts. `scripts/test-hosts` runs them, and nothing else does: pyproject.toml has `norecursedirs`.

Fixtures, each for a module: `hosts`; `laptop`, one that has the project in ~/rayllm; `supervisor`, which makes hosts
for Ray's autoscaler. `phases` collects how long things took, for the table at the end.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support import host_provider, stream_client
from support import hosts as test_hosts
from support.host_provider import Supervisor
from support.hosts import GATEWAY, Host, Hosts

ROOT = Path(__file__).parents[2]
PHASES = pytest.StashKey["Phases"]()


class Phases:
    """How long things took: (test, what, seconds)."""

    def __init__(self):
        self.rows: list[tuple[str, str, float]] = []
        self.scenario = ""

    def add(self, what: str, seconds: float) -> None:
        self.rows.append((self.scenario, what, seconds))

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """A block that is a phase, if it ends without an error."""
        start = time.monotonic()
        yield
        self.add(what, time.monotonic() - start)


def pytest_configure(config):
    config.stash[PHASES] = Phases()


def pytest_terminal_summary(terminalreporter, config):
    rows = config.stash[PHASES].rows
    if rows:
        terminalreporter.section("phases")
        terminalreporter.write_line("| scenario | phase | seconds |\n|---|---|---|")
    for scenario, what, seconds in rows:
        terminalreporter.write_line(f"| {scenario} | {what} | {seconds:.{1 if seconds >= 0.1 else 4}f} |")


@pytest.fixture(autouse=True)
def phases(request) -> Phases:
    found = request.config.stash[PHASES]
    found.scenario = request.module.__name__.rpartition(".")[2].removeprefix("test_")
    return found


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    if (missing := test_hosts.what_is_missing()) is not None:
        pytest.skip(missing)
    hosts = Hosts()
    try:
        for module in (host_provider, stream_client):
            shutil.copy(module.__file__, hosts.modules)
        yield hosts
    finally:
        hosts.close()


@pytest.fixture(scope="module")
def laptop(hosts) -> Host:
    """Where a user sits, with a clone of the project as it is here, uncommitted changes included."""
    laptop = hosts.start("laptop", 100)
    files = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT, check=True, capture_output=True, timeout=60,
    ).stdout  # fmt: skip
    copy = ["rsync", "-a", "--from0", "--files-from=-", "--ignore-missing-args", f"{ROOT}/", str(laptop.path("rayllm"))]
    subprocess.run(copy, input=files, check=True, timeout=60)
    return laptop


@pytest.fixture(scope="module")
def supervisor(hosts) -> Iterator[Supervisor]:
    supervisor = Supervisor(hosts, GATEWAY)
    yield supervisor
    supervisor.close()
