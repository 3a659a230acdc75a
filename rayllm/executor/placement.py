"""Ray for an executor: a cluster to run in, and a place for each rank."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rayllm import timeouts
from rayllm.errors import StartupError

CPUS_PER_RANK = 0.1  # a rank's own thread mostly waits for its GPU; CPU engines share what cores there are

_PASSED_ON = ("NCCL_", "TORCH_SYMM_MEM", "TORCH_NCCL_", "GLOO_", "TRITON_")
_DEFAULTS = {
    # Each actor sees its GPU as device 0; symmetric memory takes that for one GPU used twice.
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    # NVLink multicast needs a fabric manager that works; where it does not, the first use can hang all GPUs of a host.
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NCCL_NVLS_ENABLE": "0",
}

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Placement:
    """A bundle for each rank. addresses: of its node by rank; empty if Ray places it anew, as its node has died."""

    group: PlacementGroup
    bundles: tuple[int, ...]
    addresses: tuple[str, ...]

    def actor_options(self, rank: int, share: float) -> dict[str, Any]:
        """Options of an actor of a rank: a share of its bundle's GPU, no restart, the driver's environment.

        Actors that share a bundle see the same GPU, by Ray's doing, and none is given away before all have ended.
        """
        bundle = self.bundles[rank]
        resources = self.group.bundle_specs[bundle]
        environment = actor_environment()
        if not resources.get("GPU"):
            environment["OMP_NUM_THREADS"] = self._threads()
        return {
            "num_cpus": share * min(CPUS_PER_RANK, resources.get("CPU", 0)),
            "num_gpus": share * min(1, resources.get("GPU", 0)),
            "max_restarts": 0,
            "max_task_retries": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, bundle),
            "runtime_env": {"env_vars": environment},
        }

    def _threads(self) -> str:
        """Of a CPU rank: as many as this process was told to have, else its share of this host's cores.

        Threads that spin for each other on a busy core make a step many times slower, so replicas on one host are told.
        """
        cores = len(os.sched_getaffinity(0))
        return os.environ.get("OMP_NUM_THREADS") or str(max(1, cores // len(self.bundles)))


@contextmanager
def reserve(num_ranks: int, device: str) -> Iterator[Placement]:
    """A place for each rank: in the current actor's placement group if that was made for it, else in a new one, which
    is removed at the end.

    Raises StartupError that names what is needed, what is there and what is free.
    """
    bundle: dict[str, float] = {"CPU": CPUS_PER_RANK, **({"GPU": 1} if device == "cuda" else {})}
    group = get_current_placement_group()
    if group is not None and _made_for(group, num_ranks, device):
        # Bundle 0 is the current actor's own (a Serve replica's), the others are its workers'.
        yield _place(group, range(1, num_ranks + 1))
        return
    group = placement_group([bundle] * num_ranks, strategy="PACK")
    try:
        if not group.wait(timeouts.PLACEMENT_S):
            raise StartupError(_what_is_taken(num_ranks, bundle))
        yield _place(group, range(num_ranks))
    finally:
        if ray.is_initialized():
            remove_placement_group(group)


def actor_environment() -> dict[str, str]:
    """Environment variables of the actors: what users set for this process, safe defaults, the way to our modules."""
    passed = {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}
    return {**_DEFAULTS, **passed, "PYTHONPATH": os.pathsep.join(_module_folders())}


def _module_folders() -> list[str]:
    """Folders on this process's module path that no interpreter has by itself: a source tree's, those of PYTHONPATH.

    Not the package's own folder, which is there if a script in it was run: its types.py would hide the library's.
    """
    package = Path(__file__).resolve().parents[1]
    installed = {Path(prefix).resolve() for prefix in (sys.prefix, sys.base_prefix, sys.exec_prefix)}
    folders: dict[str, None] = {}
    for entry in sys.path:
        folder = Path(entry or os.curdir).resolve()
        if folder.is_dir() and folder != package and not installed & {folder, *folder.parents}:
            folders[str(folder)] = None
    return list(folders)


def _made_for(group: PlacementGroup, num_ranks: int, device: str) -> bool:
    workers = group.bundle_specs[1 : num_ranks + 1]
    return len(workers) == num_ranks and all(device == "cpu" or spec.get("GPU", 0) >= 1 for spec in workers)


def _place(group: PlacementGroup, bundles: range) -> Placement:
    """Give ranks to bundles, those of one node one after the other, this process's node first."""
    node_ids: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    here = ray.get_runtime_context().get_node_id()
    order = sorted(bundles, key=lambda index: (node_ids[index] != here, node_ids[index], index))
    return Placement(group, tuple(order), tuple(addresses.get(node_ids[index], "") for index in order))


def _what_is_taken(num_ranks: int, bundle: Mapping[str, float]) -> str:
    total, free = ray.cluster_resources(), ray.available_resources()
    for name, amount in bundle.items():
        needed = round(num_ranks * amount, 4)
        if free.get(name, 0) < needed:
            needs = f"tensor_parallel_size={num_ranks} needs {needed:g} {name}{'' if needed == 1 else 's'}"
            return f"{needs}; {free.get(name, 0):g} of {total.get(name, 0):g} are free"
    return f"tensor_parallel_size={num_ranks} needs {num_ranks} bundles {dict(bundle)}; no nodes have room for them"
