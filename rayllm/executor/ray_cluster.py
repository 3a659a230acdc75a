"""`connect_to_ray`: how every part of rayllm finds its Ray cluster, or starts one."""

from __future__ import annotations

import logging
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import ray

from rayllm import timeouts
from rayllm.errors import StartupError
from rayllm.executor.ray_compat import ask_cluster, gave_up_on_node, noted_cluster

NAMESPACE = "rayllm"  # of our named actors; what Ray calls so keeps their names apart from others'

logger = logging.getLogger(__name__)


def connect_to_ray(starts_one: bool | None = None) -> bool:
    """Make sure that this process is connected to Ray. Returns whether Ray was started for it, and is its to stop.

    starts_one: what `has_no_cluster` said, if that was asked before.

    Takes, in this order: the connection there is (always so inside actors and tasks), the cluster of RAY_ADDRESS, the
    one that `ray start` left running on this machine, a new one on this machine. Raises StartupError.

    A new one has no dashboard, keeps its files from other users, and takes orders only from who knows the token of
    `ensure_token` (unless RAY_AUTH_MODE says otherwise). Clusters that are there already have what they were started
    with.
    """
    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    starts_one = has_no_cluster() if starts_one is None else starts_one
    if starts_one:  # Ray's agent would show its counters, which name the models, to whoever reaches this machine
        os.environ.setdefault("RAY_enable_metrics_collection", "0")
        # Nor the list of past calls, which only Ray's own tools read: the GCS keeps 100,000, some 200 MiB.
        os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
    if starts_one and not any(name in os.environ for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")):
        ensure_token(Path.home() / ".ray" / "auth_token")
    try:
        if starts_one:
            _start_ray()
        else:  # without an address, Ray looks for the cluster itself, and finds the token that it wants
            _init(None)
    except StartupError:
        raise
    except Exception as error:
        raise StartupError(f"Ray cannot be started or reached: {error}") from error
    logging.getLogger("ray").setLevel(logging.WARNING)
    return starts_one


def _init(address: str | None) -> None:
    ray.init(address=address, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)


def _start_ray() -> None:
    """Start Ray on this machine; a start that fails leaves no process.

    Ray waits 30 s for its node, and longer is not to be had. The node waits for its agents, which import hundreds of
    modules: from a cold disk, or beside others that compute, that may take longer. So it is tried twice.
    """
    there = set(_processes_of_ray())
    for is_last in (False, True):
        try:
            with private_files():
                return _init("local")
        except Exception as error:
            started = [each for each in _processes_of_ray() if each not in there]
            for each in started:
                with suppress(psutil.NoSuchProcess):
                    each.kill()
            psutil.wait_procs(started, timeout=timeouts.DIE_S)
            if is_last or not gave_up_on_node(error):
                raise
            logger.warning("Ray was not up after 30 s; it is started once more")


def _processes_of_ray() -> Iterator[psutil.Process]:
    """Those that this process has started, and theirs."""
    folder = str(Path(ray.__file__).parent)
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if any(each.startswith(folder) for each in child.cmdline()):
                yield from (child, *child.children(recursive=True))


@contextmanager
def private_files() -> Iterator[None]:
    """A block in which Ray is started, so that no other user reads or replaces the files of its processes.

    They inherit the umask. Ray opens its own folders to everybody, so it gets one in a folder that is not open, unless
    RAY_TMPDIR says where. Raises StartupError if that folder is another user's.
    """
    umask, given = os.umask(0o077), os.environ.get("RAY_TMPDIR")
    try:
        if given is None:
            folder = Path(tempfile.gettempdir(), f"rayllm-{os.getuid()}")
            folder.mkdir(mode=0o700, exist_ok=True)
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
                raise StartupError(f"{folder} must be a folder that only this user can enter; or set RAY_TMPDIR")
            os.environ["RAY_TMPDIR"] = str(folder)
        yield
    finally:
        os.umask(umask)
        if given is None:
            os.environ.pop("RAY_TMPDIR", None)


def ensure_token(path: Path) -> None:
    """Make the file with Ray's token, where Ray looks for it, and keep it from other users.

    Ray itself would make it too, but readable for everyone. Raises StartupError.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            with open(path, "x", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                file.write(secrets.token_hex(32))
        except FileExistsError:
            if path.stat().st_mode & 0o077:
                path.chmod(0o600)
    except OSError as error:
        raise StartupError(f"Ray's token file {path} cannot be made: {error.strerror}") from None


def has_no_cluster() -> bool:
    """Whether there is no cluster to join, and `connect_to_ray` would start one.

    Raises StartupError if RAY_ADDRESS names one that is not there, or if the one that is there takes no orders from
    this process. Ray itself would try again for 20 s, and wait minutes for a cluster that has crashed, since the note
    that `ray start` left of it remains.
    """
    logging.getLogger("ray").setLevel(logging.ERROR)
    if ray.is_initialized():
        return False
    address = os.environ.get("RAY_ADDRESS", "")
    if address in ("local", "auto"):
        return address == "local"
    if "://" in address:
        raise StartupError(f"RAY_ADDRESS {address} is a Ray Client address; the engine has to run inside the cluster")
    if address:
        if not _answers(address, is_noted=False):
            raise StartupError(f"RAY_ADDRESS {address}: no Ray cluster answers there")
        return False
    noted = noted_cluster()
    if noted and not _answers(noted, is_noted=True):
        logger.warning("the Ray cluster that was started at %s is gone; Ray is started on this machine", noted)
        return True
    return not noted


def _answers(address: str, is_noted: bool) -> bool:
    try:
        ask_cluster(address, timeouts.FIND_CLUSTER_S, use_token=is_noted)
    except ConnectionError:
        return False
    except PermissionError:
        raise StartupError(
            f"the Ray cluster at {address} wants another token than this process has: RAY_AUTH_MODE=token, and the "
            "cluster's token in ~/.ray/auth_token or RAY_AUTH_TOKEN"
        ) from None
    return True
