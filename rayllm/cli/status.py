"""`rayllm status`: what runs in the Ray cluster."""

from __future__ import annotations

import os
from typing import Annotated

import typer


def status(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Print hosts, replicas, ranks, versions, loads, drains and the last recoveries of the Ray cluster.

    The exit code is 1 if nothing runs.
    """
    import msgspec

    from rayllm.errors import EngineDeadError, StartupError
    from rayllm.executor.ray_cluster import connect_to_ray, has_no_cluster
    from rayllm.serve.cluster.status import cluster_status, describe

    if has_no_cluster():  # that `ray start` has noted; `rayllm launch` leaves no note of the one that it starts
        os.environ["RAY_ADDRESS"] = "auto"
    try:
        connect_to_ray(starts_one=False)
    except StartupError as error:
        raise EngineDeadError(f"nothing runs: {error}") from None
    found = cluster_status()
    print(msgspec.json.encode(found).decode() if as_json else "\n".join(describe(found)))
    if not found.applications:
        raise EngineDeadError("the Ray cluster runs nothing of rayllm")
