"""What Ray Core has no public call for. tests/executor/test_ray_compat.py fails when one of these changes.

pyproject.toml allows no version of Ray that these were not tried with.
"""

from __future__ import annotations

from pathlib import Path

import ray


def noted_cluster() -> str | None:
    """The address of the cluster that `ray start` noted on this machine, which may be gone; None if there is none."""
    address: str | None = ray._private.utils.read_ray_address()
    return address


def log_folder() -> Path | None:
    """Where the processes of Ray on this node write their logs; None if this process is not connected to Ray."""
    node = ray._private.worker._global_node
    return None if node is None else Path(node.get_logs_dir_path())
