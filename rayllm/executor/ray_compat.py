"""What Ray Core has no public call for. tests/executor/test_ray_compat.py fails when one of these changes.

pyproject.toml allows no version of Ray that these were not tried with.
"""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

import grpc
import psutil
import ray
import yaml
from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
from ray._private.grpc_utils import init_grpc_channel
from ray.core.generated.autoscaler_pb2 import DrainNodeReason  # type: ignore[attr-defined]
from ray.core.generated.gcs_service_pb2 import GetClusterIdRequest  # type: ignore[attr-defined]
from ray.core.generated.gcs_service_pb2_grpc import NodeInfoGcsServiceStub


def noted_cluster() -> str | None:
    """The address of the cluster that `ray start` noted on this machine, which may be gone; None if there is none."""
    address: str | None = ray._private.utils.read_ray_address()
    return address


def log_folder() -> Path | None:
    """Where the processes of Ray on this node write their logs; None if this process is not connected to Ray."""
    node = ray._private.worker._global_node
    return None if node is None else Path(node.get_logs_dir_path())


def raylet_socket() -> str | None:
    """The Unix socket of the raylet that this process is connected to; None if there is none."""
    node = ray._private.worker._global_node
    return None if node is None else str(node.raylet_socket_name)


def gave_up_on_node(error: Exception) -> bool:
    """Whether `ray.init` says that the node which it had started was not up in time."""
    return "The current node timed out during startup" in str(error)


def ask_cluster(address: str, timeout_s: float, use_token: bool) -> None:
    """Return if a Ray cluster is at "host:port", and takes this process's token, if that has one.

    use_token: unless RAY_AUTH_MODE says otherwise; `ray.init` does so for a cluster that it finds itself. Raises
    ConnectionError if no cluster answers, PermissionError if it wants a token that this process has not.
    """
    if use_token:
        maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    with init_grpc_channel(address) as channel:
        try:
            NodeInfoGcsServiceStub(channel).GetClusterId(GetClusterIdRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            kind = PermissionError if error.code() is grpc.StatusCode.UNAUTHENTICATED else ConnectionError
            raise kind(error.details()) from None


def draining_nodes(timeout_s: float) -> dict[str, float]:
    """Ray's id of each node that somebody drains -> seconds until it goes; math.inf if nobody has said when.

    Raises an error of Ray's if the GCS does not answer in time.
    """
    deadlines = _gcs().get_draining_nodes(timeout=timeout_s)
    now_ms = time.time() * 1000
    return {node: (deadline - now_ms) / 1000 if deadline else math.inf for node, deadline in deadlines.items()}


def drain_node(node_id: str, seconds: float, why: str, timeout_s: float) -> None:
    """Tell Ray that a node goes in so many seconds, as `ray drain-node` does: nothing new is placed there.

    Raises an error of Ray's if the GCS does not answer in time, RuntimeError if Ray refuses.
    """
    reason, deadline_ms = DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION, round((time.time() + seconds) * 1000)
    is_accepted, refusal = _gcs().drain_node(node_id, reason, why, deadline_ms, timeout=timeout_s)
    if not is_accepted:
        raise RuntimeError(refusal)


def _gcs() -> Any:
    worker: Any = ray._private.worker.global_worker
    return worker.gcs_client


def autoscaler_config(gcs_address: str) -> dict[str, Any] | None:
    """The cluster.yaml of the autoscaler that runs on this host, the cluster's head; None if there is none.

    What an autoscaler may add is written nowhere else: Ray's own state has the nodes that there are.
    """
    option = "--autoscaling-config="
    for process in psutil.process_iter(["cmdline"]):
        arguments = process.info["cmdline"] or []
        files = [each.removeprefix(option) for each in arguments if each.startswith(option)]
        if files and f"--gcs-address={gcs_address}" in arguments:
            config: dict[str, Any] = yaml.safe_load(Path(os.path.expanduser(files[0])).read_text())
            return config
    return None
