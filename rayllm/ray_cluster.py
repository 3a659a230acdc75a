"""`connect_to_ray`: how every part of rayllm finds its Ray cluster, or starts one."""

from __future__ import annotations

import logging
import os
import socket

import ray

from rayllm.errors import StartupError

logger = logging.getLogger(__name__)


def connect_to_ray() -> bool:
    """Make sure that this process is connected to Ray. Returns whether Ray was started for it, and is its to stop.

    Takes, in this order: the connection there is (always so inside actors and tasks), the cluster of RAY_ADDRESS, the
    one that `ray start` left running on this machine, a new one on this machine. Raises StartupError.
    """
    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    starts_one = _has_no_cluster()
    try:
        # Without an address, Ray looks for the cluster itself, and finds the token that it wants.
        ray.init(
            address="local" if starts_one else None,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except Exception as error:
        hint = "" if starts_one or "RAY_AUTH_MODE" in os.environ else " (does the cluster want RAY_AUTH_MODE=token?)"
        raise StartupError(f"Ray cannot be started or reached: {error}{hint}") from error
    logging.getLogger("ray").setLevel(logging.WARNING)
    return starts_one


def _has_no_cluster() -> bool:
    """Whether there is no cluster to join. Raises StartupError if RAY_ADDRESS names one that is not there.

    Ray itself would wait minutes for a cluster that has crashed, since the note that `ray start` left of it remains.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    if address in ("local", "auto"):
        return address == "local"
    if "://" in address:
        raise StartupError(f"RAY_ADDRESS {address} is a Ray Client address; the engine has to run inside the cluster")
    if address:
        if not _answers(address):
            raise StartupError(f"RAY_ADDRESS {address}: no Ray cluster answers there")
        return False
    noted: str | None = ray._private.utils.read_ray_address()
    if noted and not _answers(noted):
        logger.warning("the Ray cluster that was started at %s is gone; Ray is started on this machine", noted)
        return True
    return not noted


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except (OSError, ValueError):
        return False
    return True
