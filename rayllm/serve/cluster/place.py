"""Where this process is, as Ray and Ray Serve know it."""

from __future__ import annotations

from typing import NamedTuple

import ray
from ray import serve


class Place(NamedTuple):
    """A Serve replica's."""

    # Of the Serve application.
    app_name: str
    # Serve's, unique for each start.
    replica_id: str
    # Ray's id of the node.
    node_id: str
    # The node's address in the cluster.
    host: str

    @property
    def replica_index(self) -> int:
        """Serve's rank of the replica: from 0 to the number of replicas - 1, given anew when one has gone."""
        return int(serve.get_replica_context().rank.rank)


def own_place() -> Place:
    """Of the Serve replica that runs in this process."""
    context = serve.get_replica_context()
    return Place(context.app_name, context.replica_id.unique_id, own_node_id(), ray.util.get_node_ip_address())


def own_node_id() -> str:
    """Ray's id of this process's node."""
    node_id: str = ray.get_runtime_context().get_node_id()
    return node_id


def address(host: str, port: int) -> str:
    """As URLs and HAProxy have it: "host:port", with brackets around IPv6 addresses."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
