"""Shared by all tests: modules beside the tests are importable by name (tests are no package), one torch thread.

With `pytest -n`, each of pytest's processes has Ray's files in a folder of its own, so that it sees only the clusters
that its tests start.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton, as transformers does
sys.path.insert(0, str(Path(__file__).parent))


def pytest_configure(config):
    if "PYTEST_XDIST_WORKER" in os.environ:
        # Short: it is the beginning of the paths of sockets.
        folder = os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="ray-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_addoption(parser):
    parser.addoption(
        "--full-matrix", action="store_true", help="every combination, of tests that have more than time allows"
    )


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--full-matrix"):
        left_out = [item for item in items if item.get_closest_marker("full_matrix")]
        items[:] = [item for item in items if not item.get_closest_marker("full_matrix")]
        config.hook.pytest_deselected(items=left_out)


@pytest.fixture(scope="session")
def full_matrix(request) -> bool:
    return request.config.getoption("--full-matrix")


@pytest.fixture(scope="session")
def ray_cluster():
    """One local Ray for all tests that need one; engines join it and leave it running."""
    import ray

    if not ray.is_initialized():
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="warning")
    yield
    ray.shutdown()
