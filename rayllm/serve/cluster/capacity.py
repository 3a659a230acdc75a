"""`Capacity`: the GPUs of a Ray cluster, those that its autoscaler may add included.

Nobody asks the autoscaler: replicas that wait for a place do, which Ray Serve makes as soon as it has the application,
and which end with it. But only what it can add is worth waiting for, and decides what `device: auto` is.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import ray

from rayllm import timeouts
from rayllm.errors import StartupError
from rayllm.executor.ray_compat import autoscaler_config

HEAD = "node:__internal_head__"  # the resource by which Ray marks the head


class NodeType(NamedTuple):
    """A kind of node that an autoscaler may add."""

    name: str
    # GPUs of each node; None if the autoscaler learns that from the first one.
    num_gpus: float | None
    # Nodes of this kind at most.
    max_nodes: int


class Capacity(NamedTuple):
    """The GPUs of a cluster."""

    # That it has.
    num_gpus: float
    # What its autoscaler may add; none if it has no autoscaler.
    node_types: tuple[NodeType, ...] = ()
    # Nodes of all types together.
    max_nodes: int = 0
    # Nobody knows what may be added.
    is_open: bool = False

    @property
    def grows(self) -> bool:
        """Whether replicas that find no place may get one."""
        return self.is_open or bool(self.node_types)

    @property
    def most_gpus(self) -> float:
        """That it can come to."""
        return math.inf if self.is_open else max(self.num_gpus, sum(self._hosts()))

    def has_hosts_for(self, count: int, num_gpus: int) -> bool:
        """Whether so many replicas, each of so many GPUs, can each get a host that the autoscaler adds."""
        return sum(host // num_gpus for host in self._hosts()) >= count

    def describe(self) -> str:
        """What there is, for an error."""
        has = f"the cluster has {self.num_gpus:g}"
        if not self.node_types:
            return has
        types = ", ".join(f"{each.max_nodes} {each.name} of {each.num_gpus or 0:g}" for each in self.node_types)
        return f"{has}, and its autoscaler can bring it to {self.most_gpus:g} (at most {self.max_nodes} nodes: {types})"

    def _hosts(self) -> list[float]:
        """The GPUs of the largest hosts that there can be."""
        hosts = [each.num_gpus or 0.0 for each in self.node_types for _ in range(min(each.max_nodes, self.max_nodes))]
        return sorted(hosts, reverse=True)[: self.max_nodes]


def cluster_capacity() -> Capacity:
    """Of the cluster that this process is connected to. Takes a second or two, as the head has to be asked.

    Raises StartupError if that does not answer.
    """
    has = ray.cluster_resources().get("GPU", 0)
    ask: Any = ray.remote(num_cpus=0, resources={HEAD: 0.001})(autoscaler_config)
    try:
        config = ray.get(ask.remote(ray.get_runtime_context().gcs_address), timeout=timeouts.FIND_AUTOSCALER_S)
    except Exception as error:
        raise StartupError(f"the head of the Ray cluster does not say what its autoscaler may add: {error}") from None
    return Capacity(has) if config is None else planned_capacity(config, has, len(ray.nodes()))


def planned_capacity(config: dict[str, Any], num_gpus: float, num_nodes: int) -> Capacity:
    """What comes of a cluster.yaml. num_gpus, num_nodes: that are there."""
    max_nodes = int(config.get("max_workers", 0))
    types = tuple(
        NodeType(name, options["resources"].get("GPU", 0) if options.get("resources") else None, most)
        for name, options in config.get("available_node_types", {}).items()
        if name != config.get("head_node_type") and (most := int(options.get("max_workers", max_nodes)))
    )
    unknown = any(each.num_gpus is None for each in types) and num_nodes <= max_nodes
    return Capacity(num_gpus, types, max_nodes, is_open=unknown)
