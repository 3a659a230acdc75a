"""`ResponseStore`: stored responses as files of a folder, which all API servers share that have the same one.

    <id>.json     the response, with all that the next one of its conversation needs; replaced as a whole
    <id>.events   of one that runs in the background and streams: its events so far, a line of JSON each
    <id>.run      while it runs in the background: who runs it; the time of its last change is a sign of life
    <id>.cancel   it is to be cancelled

Methods read and write files, and belong into threads.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rayllm import timeouts

FOLDER_MODE, FILE_MODE = 0o700, 0o600
SWEEP_S = 60.0  # at least so often, the store looks for what is too old
# And whenever so many parts of its bounds were added here: with eight API servers the bounds hold.
SWEEP_PARTS = 64
SWEEP_TO = 7 / 8  # of a bound that was exceeded
RECORD, EVENTS, RUN, CANCEL = ".json", ".events", ".run", ".cancel"

_ID = re.compile(r"resp_[0-9a-f]{32}")  # nothing else becomes part of a path

Json = dict[str, Any]


class StoredResponse(msgspec.Struct):
    """One response. owner: the name of the API key that it belongs to, or ""."""

    owner: str
    # The Response object.
    response: Json
    # The items of its conversation before its output, those of earlier responses included.
    input: list[Json]
    # Of one that runs in the background: the body of its request, and what makes another API server's request the
    # same: `IdempotencyKey.fingerprint` and the id of its key.
    body: msgspec.Raw = msgspec.Raw(b"null")
    fingerprint: bytes = b""

    @property
    def has_ended(self) -> bool:
        return self.response["status"] not in ("queued", "in_progress")


class StoreLimits(NamedTuple):
    """How much is stored, and how long after its last change, in seconds."""

    responses: int = 10_000
    num_bytes: int = 2**30
    ttl: float = 3600.0


class Events(NamedTuple):
    """Events of a log from an offset on, as JSON, and where the next ones begin."""

    lines: list[bytes]
    offset: int


class ResponseStore:
    """All responses of a folder. runner: names this API server; unique for each start."""

    def __init__(self, folder: Path, limits: StoreLimits = StoreLimits()):
        self._folder, self._limits = folder, limits
        self._runner = secrets.token_hex(16).encode()
        self._added, self._added_bytes, self._next_sweep = 0, 0, 0.0

    # ---- stored responses

    def write(self, stored: StoredResponse) -> None:
        """Store a response, or a new state of it."""
        data = msgspec.json.encode(stored)
        self._replace(self._path(stored.response["id"], RECORD), data)
        self._added += 1
        self._added_bytes += len(data)
        limits = self._limits
        if (
            time.monotonic() > self._next_sweep
            or self._added * SWEEP_PARTS >= limits.responses
            or self._added_bytes * SWEEP_PARTS >= limits.num_bytes
        ):
            self.sweep()

    def read(self, response_id: str, owner: str) -> StoredResponse | None:
        """A response of this owner's; None if there is none."""
        if _ID.fullmatch(response_id) is None:
            return None
        stored = self._load(response_id)
        is_old = self._age(response_id, RECORD) > self._limits.ttl and not self.runs(response_id)
        return None if stored is None or is_old or stored.owner != owner else stored

    def delete(self, response_id: str) -> None:
        """Remove what `read` has found. If it runs in the background, it ends."""
        with self._locked():
            self._remove(response_id)

    # ---- those that run in the background

    def begin(self, stored: StoredResponse, events: bytes = b"") -> bool:
        """Store a new response that this API server runs, and the first lines of its log. False if there is one."""
        response_id = stored.response["id"]
        with self._locked():
            if self._age(response_id, RECORD) <= self._limits.ttl:
                return False
            self._remove(response_id)  # one that is too old
            self._replace(self._path(response_id, RUN), self._runner)
            if events:
                self.log(response_id, events)
            self.write(stored)
            return True

    def claim(self, response_id: str, *, lost_s: float | None = None) -> bool:
        """Whether this API server is the one to run a response from now on.

        lost_s: it has not ended, and nobody has given a sign of life for so long; None for a new response.
        """
        with self._locked():
            if lost_s is not None:
                stored = self._load(response_id)
                if stored is None or stored.has_ended or self.silence(response_id) < lost_s:
                    return False
            self._replace(self._path(response_id, RUN), self._runner)
            return True

    def runs(self, response_id: str) -> bool:
        """Whether there is one that runs it, though it may be dead."""
        return self._path(response_id, RUN).exists()

    def silence(self, response_id: str) -> float:
        """Seconds since the last sign of life; infinite if it does not run."""
        return self._age(response_id, RUN)

    def beat(self, response_id: str) -> bool:
        """Give a sign of life. Returns whether to go on: it is not deleted, and no other API server runs it."""
        path = self._path(response_id, RUN)
        try:
            if path.read_bytes() != self._runner:
                return False
            os.utime(path)
        except FileNotFoundError:
            return False
        return True

    def finish(self, stored: StoredResponse, events: bytes = b"", last: bytes = b"") -> bool:
        """Store what came of it, and run it no more; False if it is deleted, or another API server runs it.

        events: what its log lacks, if it has one, but for the `last` one. Who finds that the response has ended finds
        these, and who finds the last event finds that it has ended.
        """
        response_id = stored.response["id"]
        with self._locked():
            if not self.beat(response_id):
                return False
            if events:
                self.log(response_id, events)
            self.write(stored)
            if last:
                self.log(response_id, last)
            for kind in (RUN, CANCEL):
                self._path(response_id, kind).unlink(missing_ok=True)
            return True

    def release(self, response_id: str) -> None:
        """Run it no more, though it has not ended: another API server may claim it at once."""
        with self._locked(), contextlib.suppress(FileNotFoundError):
            if self.beat(response_id):
                then = time.time() - timeouts.RESPONSE_SILENCE_S - 1
                os.utime(self._path(response_id, RUN), (then, then))

    def cancel(self, response_id: str) -> None:
        """Tell who runs it that it is to end."""
        self._replace(self._path(response_id, CANCEL), b"")

    def is_cancelled(self, response_id: str) -> bool:
        """Whether it is to end."""
        return self._path(response_id, CANCEL).exists()

    def log(self, response_id: str, lines: bytes) -> None:
        """Add events: whole lines."""
        with open(self._path(response_id, EVENTS), "ab", opener=_private) as file:
            file.write(lines)
        self._added_bytes += len(lines)

    def events(self, response_id: str, offset: int = 0) -> Events | None:
        """The events from an offset on; None if it has no log."""
        try:
            with open(self._path(response_id, EVENTS), "rb") as file:
                file.seek(offset)
                data = file.read()
        except FileNotFoundError:
            return None
        whole = data[: data.rfind(b"\n") + 1]  # the last one may be about to be written
        return Events(whole.splitlines(), offset + len(whole))

    def cut_log(self, response_id: str) -> list[bytes]:
        """The events so far, for who goes on with them; a part of one that came last is removed."""
        found = self.events(response_id)
        if found is None:
            return []
        os.truncate(self._path(response_id, EVENTS), found.offset)
        return found.lines

    # ---- bounds

    def sweep(self) -> None:
        """Remove what is too old, and the oldest of what is too much; those that run go last."""
        self._added, self._added_bytes, self._next_sweep = 0, 0, time.monotonic() + SWEEP_S
        now, found = time.time(), defaultdict[str, list[tuple[str, float, int]]](list)
        for entry in self._entries():
            with contextlib.suppress(FileNotFoundError):
                status, (name, kind) = entry.stat(), os.path.splitext(entry.name)
                if _ID.fullmatch(name):
                    found[name].append((kind, status.st_mtime, status.st_size))
                elif name.startswith(_TEMPORARY) and status.st_mtime < now - SWEEP_S:  # of one that was killed
                    os.unlink(entry.path)
        responses = []  # (whether it runs, its last change, bytes, id)
        for response_id, files in found.items():
            last = max(changed for _, changed, _ in files)
            runs = any(kind == RUN for kind, _, _ in files) and last > now - timeouts.KEEP_S
            if last < now - self._limits.ttl and not runs:
                self._remove(response_id)
            else:
                responses.append((runs, last, sum(size for _, _, size in files), response_id))
        responses.sort()
        count, size = len(responses), sum(num_bytes for _, _, num_bytes, _ in responses)
        is_over = count > self._limits.responses or size > self._limits.num_bytes
        share = SWEEP_TO if is_over else 1.0
        for _, _, num_bytes, response_id in responses:
            if count <= share * self._limits.responses and size <= share * self._limits.num_bytes:
                break
            self._remove(response_id)
            count, size = count - 1, size - num_bytes

    # ---- files

    def _load(self, response_id: str) -> StoredResponse | None:
        try:
            return msgspec.json.decode(self._path(response_id, RECORD).read_bytes(), type=StoredResponse)
        except FileNotFoundError:
            return None

    def _path(self, response_id: str, kind: str) -> Path:
        return self._folder / f"{response_id}{kind}"

    def _remove(self, response_id: str) -> None:
        for kind in (RECORD, EVENTS, RUN, CANCEL):
            self._path(response_id, kind).unlink(missing_ok=True)

    def _entries(self) -> Iterator[os.DirEntry[str]]:
        with os.scandir(self._folder) as entries:
            yield from entries

    def _age(self, response_id: str, kind: str) -> float:
        """Seconds since a file's last change; infinite if there is none."""
        try:
            return time.time() - self._path(response_id, kind).stat().st_mtime
        except FileNotFoundError:
            return float("inf")

    def _replace(self, path: Path, data: bytes) -> None:
        temporary = self._folder / f"{_TEMPORARY}{secrets.token_hex(16)}"
        try:
            with open(temporary, "xb", opener=_private) as file:
                file.write(data)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """No other API server is in such a block, on this host or another one."""
        lock = os.open(self._folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)


_TEMPORARY = ".new-"


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, FILE_MODE)
