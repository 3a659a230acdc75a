"""Checkpoints that a host does not have: copied once from another host, over Ray's object store.

Models come from the host of `rayllm launch`, which offers them, adapters that are loaded later from any host that has
them, which nobody has to offer.

A copy lies at the same path as the original, with the same times of change, and says that it is one: a folder that
somebody else has put there is left alone. Snapshots in the hub's cache are the exception: their name is the commit, so
their files are the same on all hosts, whoever has put them there, and only those that lack are copied.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import re
import shutil
import socket
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayllm.errors import ModelError
from rayllm.executor.ray_cluster import NAMESPACE
from rayllm.hub import ADAPTER_FILES, text_files

CHUNK = 64 * 2**20  # bytes
IN_FLIGHT = 4  # chunks; while one is written, the next ones are on their way
MARK = ".copied-by-rayllm"

logger = logging.getLogger("ray.serve")


class File(NamedTuple):
    """One of a checkpoint's files."""

    # Below the folder.
    path: str
    size: int
    # Of the last change, nanoseconds.
    time: int

    @property
    def is_weights(self) -> bool:
        """Whether only ranks need it."""
        return self.path.endswith(".safetensors")


class CheckpointSource:
    """The Ray actor on the host that has the folder."""

    def __init__(self, folder: str):
        self._folder = Path(folder)

    def files(self) -> list[File]:
        """All of them but hidden ones; of a snapshot, those that serving needs, as other tools may have added more.

        Of an adapter only its two: beside them may be what it was trained with. Raises FileNotFoundError.
        """
        if not self._folder.is_dir():
            raise FileNotFoundError(f"there is no folder {self._folder}")
        files = list_files(self._folder)
        if any(file.path == ADAPTER_FILES[0] for file in files):
            return [file for file in files if file.path in ADAPTER_FILES]
        if not is_snapshot(self._folder):
            return files
        texts = set(text_files([file.path for file in files]))
        return [file for file in files if file.path in texts or (file.is_weights and "/" not in file.path)]

    def read(self, path: str, offset: int, size: int) -> np.ndarray:
        """Bytes of a file. Raises FileNotFoundError for one that is not of the checkpoint."""
        if path not in {file.path for file in self.files()}:
            raise FileNotFoundError(path)
        return np.fromfile(self._folder / path, np.uint8, size, offset=offset)


def is_snapshot(folder: Path) -> bool:
    """Whether a folder is a model at a commit in the hub's cache: it may lack files, but none ever changes."""
    return folder.parent.name == "snapshots" and re.fullmatch("[0-9a-f]{40}", folder.name) is not None


def offer_checkpoint(folder: str, node_id: str) -> Callable[[], None]:
    """Let other hosts copy a folder of this one, also when this process has gone.

    node_id: Ray's id of this node. Returns what ends that.
    """
    actor = _start_source(folder, node_id, lifetime="detached")
    return lambda: ray.kill(actor)


@contextlib.contextmanager
def offered_checkpoint(folder: str) -> Iterator[None]:
    """Let other hosts copy a folder of this one while the block runs, at most as long as this process lives."""
    try:
        ray.get_actor(_name(folder), namespace=NAMESPACE)
    except ValueError:
        actor = _start_source(folder, ray.get_runtime_context().get_node_id(), lifetime=None)
    else:  # a server does it
        actor = None
    try:
        yield
    finally:
        if actor is not None:
            ray.kill(actor)


def _start_source(folder: str, node_id: str, lifetime: str | None) -> Any:
    actor: Any = ray.remote(CheckpointSource)
    return actor.options(
        name=_name(folder),
        namespace=NAMESPACE,
        lifetime=lifetime,
        get_if_exists=True,
        num_cpus=0,
        max_restarts=-1,
        max_concurrency=IN_FLIGHT,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
    ).remote(folder)


def fetch_checkpoint(folder: str, *, weights: bool = True) -> int:
    """Bring what this host lacks of a checkpoint; returns the bytes. Returns at once if it has one of its own, a
    snapshot if that is whole.

    weights: those too. Waits while another process of this host does the same. Raises ModelError.
    """
    if not ray.is_initialized() or _is_own(Path(folder)):
        return 0
    try:
        source = ray.get_actor(_name(folder), namespace=NAMESPACE)
    except ValueError:  # nobody offers it
        return 0
    return _copy_from(source, folder, weights=weights)


def fetch_adapter(folder: str, node_ids: Sequence[str]) -> int:
    """Bring what this host lacks of an adapter's folder; returns the bytes. Returns at once if it has one of its own.

    node_ids: Ray's ids of nodes that may have the folder, which are asked in this order. Raises ModelError.
    """
    if not ray.is_initialized() or _is_own(Path(folder)):
        return 0
    there = {node["NodeID"] for node in ray.nodes() if node["Alive"]} - {ray.get_runtime_context().get_node_id()}
    for node_id in dict.fromkeys(each for each in node_ids if each in there):
        actor: Any = ray.remote(CheckpointSource)
        affinity = NodeAffinitySchedulingStrategy(node_id, soft=False)
        source = actor.options(num_cpus=0, max_concurrency=IN_FLIGHT, scheduling_strategy=affinity).remote(folder)
        try:
            return _copy_from(source, folder)
        except FileNotFoundError:
            continue
        finally:
            ray.kill(source)
    return 0


def spread_adapter(folder: str, node_ids: Iterable[str], seconds: float) -> None:
    """Have other nodes fetch an adapter's folder from this one, in so many seconds. Raises ModelError."""
    here = ray.get_runtime_context().get_node_id()
    fetch = ray.remote(fetch_adapter)
    calls = [
        fetch.options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)).remote(
            folder, [here]
        )
        for node_id in set(node_ids) - {here}
    ]
    try:
        ray.get(calls, timeout=seconds)
    except RayError as error:
        cause = getattr(error, "cause", None)
        raise cause if isinstance(cause, ModelError) else ModelError(f"{folder} cannot be copied: {error}") from error


def _is_own(folder: Path) -> bool:
    """Whether somebody else has put a folder here, which is left alone."""
    return folder.exists() and not (folder / MARK).exists() and not is_snapshot(folder)


def _copy_from(source: Any, folder: str, *, weights: bool = True) -> int:
    """Raises FileNotFoundError if the source has no such folder, and ModelError."""
    try:
        files = ray.get(source.files.remote())
        return copy_checkpoint(Path(folder), files, _chunks_of(source), weights=weights)
    except (OSError, RayError) as error:
        if isinstance(getattr(error, "cause", None), FileNotFoundError):
            raise FileNotFoundError(folder) from None
        reason = str(error).strip().rpartition("\n")[2]
        raise ModelError(
            f"{folder} is not on host {socket.gethostname()}, nor can it be copied there: {reason}"
        ) from None


def copy_checkpoint(
    target: Path, files: list[File], chunks: Callable[[File], Iterator[np.ndarray]], *, weights: bool = True
) -> int:
    """Copy files that are not there as they are; returns the bytes. chunks: of a file, in order. Raises OSError."""
    wanted = [file for file in files if weights or not file.is_weights]
    if is_snapshot(target) and not _missing(target, wanted):
        return 0  # the original too, which may be read-only
    _make_copy(target)
    with (target / MARK).open("w") as mark:
        fcntl.flock(mark, fcntl.LOCK_EX)  # one process a host
        missing = _missing(target, wanted)
        num_bytes, free = sum(file.size for file in missing), shutil.disk_usage(target).free
        if num_bytes > free:
            raise OSError(f"it takes {num_bytes} bytes, and {free} are free")
        for file in missing:
            logger.info("copying %s, %d bytes", target / file.path, file.size)
            _write(target / file.path, file, chunks(file))
    return num_bytes


def _missing(target: Path, files: list[File]) -> list[File]:
    """Those files that a folder has not, or not as they are. Times of change mean nothing in snapshots."""
    there = {file.path: file for file in list_files(target)}
    if not is_snapshot(target):
        return [file for file in files if there.get(file.path) != file]
    return [file for file in files if file.path not in there or there[file.path].size != file.size]


def _make_copy(target: Path) -> None:
    """A folder that is marked as a copy from its first moment on, unless there is one: others look for the mark."""
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    new = target.parent / f".{target.name}.{uuid.uuid4().hex}"
    new.mkdir()
    (new / MARK).touch()
    try:
        new.rename(target)
    except OSError:
        shutil.rmtree(new)
        if not target.exists():  # then it is not that another process was first
            raise


def list_files(folder: Path) -> list[File]:
    """All files below a folder but hidden ones."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    plain = [path for path in paths if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    return [File(str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns) for path in plain]


def _chunks_of(source: Any) -> Callable[[File], Iterator[np.ndarray]]:
    def chunks(file: File) -> Iterator[np.ndarray]:
        offsets = iter(range(0, file.size, CHUNK))
        coming = deque(source.read.remote(file.path, offset, CHUNK) for offset in itertools.islice(offsets, IN_FLIGHT))
        while coming:
            yield ray.get(coming.popleft())
            coming.extend(source.read.remote(file.path, offset, CHUNK) for offset in itertools.islice(offsets, 1))

    return chunks


def _write(path: Path, file: File, chunks: Iterator[np.ndarray]) -> None:
    """A file appears whole, or not at all: engines map them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    with contextlib.ExitStack() as undo:
        undo.callback(part.unlink, missing_ok=True)
        with part.open("wb") as output:
            for chunk in chunks:
                output.write(chunk.data)
        if part.stat().st_size != file.size:
            raise OSError(f"{file.path} has changed while it was copied")
        os.utime(part, ns=(file.time, file.time))
        part.rename(path)


def _name(folder: str) -> str:
    return f"checkpoint {folder}"
