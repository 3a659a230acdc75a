"""`BatchStore`: the batches of /v1/batches in a folder, which all API servers share that have the same one.

    <id>/cancel               it is to be cancelled
    <id>/<term>/batch.json    the batch, as the writer of the term (`terms.py`) has left it
    <id>/<term>/results.jsonl its results so far, a `ResultFile`; those of the terms before are in it
    <id>/<term>/beat          changes twice a second, as long as the term's writer works on the batch

A batch is made with a term that nobody works on. An API server that takes it up begins the next one, and its end is a
term too: so a batch ends once, however many servers have worked on it. A writer is taken to be lost when its beat does
not change for BATCH_SILENCE_S by the clock of the one that looks. That may be wrong, and only costs work then.

Methods read and write files, and belong into threads.
"""

from __future__ import annotations

import re
import secrets
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from rayllm import timeouts
from rayllm.serve.http.batches.files import FOLDER_MODE, FileLimits, FileStore, write_whole
from rayllm.serve.http.batches.terms import begin_term, last_term
from rayllm.serve.http.errors import ApiError

MAX_BATCHES = 1000
WINDOW_S = 24 * 3600

_ID = re.compile(r"batch_[0-9a-f]{32}")  # nothing else becomes part of a path

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
ENDED = ("failed", "completed", "expired", "cancelled")


class RequestCounts(msgspec.Struct):
    """Of a batch's requests."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchError(msgspec.Struct):
    """Why a batch failed as a whole."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(msgspec.Struct):
    """All reasons."""

    data: list[BatchError]
    object: Literal["list"] = "list"


class Batch(msgspec.Struct, kw_only=True):
    """OpenAI's Batch object. Times are Unix times in seconds."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    input_file_id: str
    completion_window: str
    status: Status = "validating"
    created_at: int
    expires_at: int
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: BatchErrors | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    metadata: dict[str, str] | None = None

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED


class StoredBatch(msgspec.Struct):
    """A batch. owner: the name of the API key that it belongs to, or "". output_ttl: seconds that its results stay.

    waits_since: the Unix time since when it waits to be taken up, or did. term: the number of the one that wrote it.
    """

    owner: str
    batch: Batch
    output_ttl: float | None = None
    waits_since: float = 0.0
    term: int = 0

    def file_id(self, kind: Literal["output", "error"], term: int | None = None) -> str:
        """Of the file that a term makes of its results: its own, so that no other term writes it."""
        name = f"{self.batch.id} {self.term if term is None else term} {kind}"
        return f"file-{sha256(name.encode()).hexdigest()[:32]}"


class _Beat(NamedTuple):
    """A beat as it was seen, and when for the first time."""

    term: int
    text: bytes
    since: float


def no_such_batch(batch_id: str) -> ApiError:
    """A batch that there is not, or that is another's."""
    return ApiError(404, f"there is no batch {batch_id[:64]!r}", code="batch_not_found", param="batch_id")


class BatchStore:
    """All batches of a folder, and the files of clients beside them.

    monotonic: the clock that tells for how long a beat did not change.
    """

    def __init__(
        self,
        folder: Path,
        limits: FileLimits = FileLimits(),
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ):
        self.files, self.clock = FileStore(folder / "files", limits, clock), clock
        self._folder, self._monotonic = folder / "batches", monotonic
        self._ended: set[str] = set()
        self._beats: dict[str, _Beat] = {}

    # ---- for clients

    def create(
        self,
        owner: str,
        endpoint: str,
        input_file_id: str,
        window: str,
        metadata: dict[str, str] | None,
        output_ttl: float | None,
    ) -> Batch:
        """A new batch, which the next API server takes up that looks. Raises ApiError 404 and 429."""
        if self.files.get(input_file_id, owner).purpose != "batch":
            raise ApiError(400, "input_file_id: the file's purpose must be batch", param="input_file_id")
        if len(self._ids()) >= MAX_BATCHES:
            raise ApiError(429, f"the server keeps {MAX_BATCHES} batches already", code="too_many_batches")
        now = self.clock()
        batch = Batch(
            id=f"batch_{secrets.token_hex(16)}",
            endpoint=endpoint,
            input_file_id=input_file_id,
            completion_window=window,
            created_at=int(now),
            expires_at=int(now) + WINDOW_S,
            metadata=metadata,
        )
        self._path(batch.id).mkdir(FOLDER_MODE, parents=True)
        self._begin(StoredBatch(owner, batch, output_ttl, waits_since=now))
        return batch

    def load(self, batch_id: str) -> StoredBatch | None:
        """A batch as it is now, whoever owns it; None if there is none."""
        folder = self._path(batch_id)
        while (term := last_term(folder)) is not None:
            with suppress(FileNotFoundError):  # as the next one has begun
                stored = msgspec.json.decode((folder / str(term) / "batch.json").read_bytes(), type=StoredBatch)
                if not stored.batch.has_ended and (cancelled_at := self._cancelled_at(batch_id)) is not None:
                    stored.batch.status, stored.batch.cancelling_at = "cancelling", cancelled_at
                return stored
        return None

    def get(self, batch_id: str, owner: str) -> Batch:
        """A batch as it is now. Raises ApiError 404."""
        stored = self.load(batch_id)
        if stored is None or stored.owner != owner:
            raise no_such_batch(batch_id)
        return stored.batch

    def cancel(self, batch_id: str, owner: str) -> Batch:
        """Have it cancelled by whoever works on it. Raises ApiError 404, and 409 if it has ended."""
        if (batch := self.get(batch_id, owner)).has_ended:
            raise ApiError(409, f"the batch is {batch.status} and cannot be cancelled", code="batch_ended")
        (self._path(batch_id) / "cancel").touch(mode=0o600)
        return self.get(batch_id, owner)

    def owned_by(self, owner: str) -> list[Batch]:
        """All batches of an owner, the newest first."""
        stored = [self.load(batch_id) for batch_id in self._ids()]
        batches = [each.batch for each in stored if each is not None and each.owner == owner]
        return sorted(batches, key=lambda batch: (batch.created_at, batch.id), reverse=True)

    # ---- for those that work on them

    def waiting(self) -> list[str]:
        """Batches that have not ended and that nobody works on; first those that have waited longest."""
        ids = set(self._ids())
        self._ended &= ids
        self._beats = {batch_id: beat for batch_id, beat in self._beats.items() if batch_id in ids}
        found = []
        for batch_id in ids - self._ended:
            stored = self.load(batch_id)
            if stored is not None and stored.batch.has_ended:
                self._ended.add(batch_id)
            elif stored is not None and self._is_free(stored):
                found.append((stored.waits_since, batch_id))
        return [batch_id for _since, batch_id in sorted(found)]

    def take(self, batch_id: str) -> StoredBatch | None:
        """Begin a term of a batch, with the results so far. None if it has ended, or another works on it."""
        stored = self.load(batch_id)
        if stored is None or stored.batch.has_ended or not self._is_free(stored):
            return None
        before = self.results(stored)
        stored.term += 1
        return stored if self._begin(stored, before) else None

    def beat(self, stored: StoredBatch) -> bool:
        """Say that its term's writer works on it; False if another term has begun."""
        with suppress(FileNotFoundError):
            if self.is_last(stored):
                (self._term(stored) / "beat").write_bytes(secrets.token_bytes(8))
                return True
        return False

    def is_last(self, stored: StoredBatch) -> bool:
        """Whether its term is the one that counts."""
        return last_term(self._path(stored.batch.id)) == stored.term

    def save(self, stored: StoredBatch) -> None:
        """Write how far it is. Raises FileNotFoundError if another term has begun."""
        write_whole(self._term(stored) / "batch.json", msgspec.json.encode(stored))

    def release(self, stored: StoredBatch) -> None:
        """Work on it no more: it waits again, behind all that wait already."""
        stored.waits_since = self.clock()
        with suppress(FileNotFoundError):
            self.save(stored)
            (self._term(stored) / "beat").unlink()

    def end(self, stored: StoredBatch) -> bool:
        """End the batch as it is now; False if another term has begun, with which this one's files are removed."""
        ended = msgspec.structs.replace(stored, term=stored.term + 1)
        is_ended = self._begin(ended)
        for term in range(1, stored.term) if is_ended else [stored.term]:
            self.files.discard(stored.file_id("output", term))
            self.files.discard(stored.file_id("error", term))
        return is_ended

    def cancelled_at(self, stored: StoredBatch) -> int | None:
        """Since when it is to be cancelled."""
        return self._cancelled_at(stored.batch.id)

    def results(self, stored: StoredBatch) -> Path:
        """Where the results are that its term has."""
        return self._term(stored) / "results.jsonl"

    def sweep(self) -> None:
        """Remove batches that have ended long ago, and files that are too old."""
        for batch_id in self._ids():
            stored, path = self.load(batch_id), self._path(batch_id)
            if stored is None or stored.batch.has_ended:
                with suppress(FileNotFoundError):  # another server was faster
                    if self.clock() - path.stat().st_mtime > self.files.limits.ttl:
                        path.rename(path.with_name(f"removed_{batch_id}"))  # at once: its end must not go first
        for path in self._folder.glob("removed_*"):
            shutil.rmtree(path, ignore_errors=True)
        self.files.sweep()

    # ---- files

    def _begin(self, stored: StoredBatch, results: Path | None = None) -> bool:
        """Begin its term. results: of the term before, if it is begun to work on the batch."""

        def prepare(folder: Path) -> None:
            write_whole(folder / "batch.json", msgspec.json.encode(stored))
            if results is not None:
                (folder / "beat").write_bytes(b"")
                if results.exists():
                    shutil.copyfile(results, folder / results.name)

        return begin_term(self._path(stored.batch.id), stored.term, prepare)

    def _is_free(self, stored: StoredBatch) -> bool:
        """Whether nobody works on it, as far as can be seen."""
        try:
            text = (self._term(stored) / "beat").read_bytes()
        except FileNotFoundError:
            return True
        now, known = self._monotonic(), self._beats.get(stored.batch.id)
        if known is None or (known.term, known.text) != (stored.term, text):
            known = self._beats[stored.batch.id] = _Beat(stored.term, text, now)
        return now - known.since > timeouts.BATCH_SILENCE_S

    def _cancelled_at(self, batch_id: str) -> int | None:
        try:
            return int((self._path(batch_id) / "cancel").stat().st_mtime)
        except FileNotFoundError:
            return None

    def _ids(self) -> list[str]:
        return [path.name for path in self._folder.glob("batch_*")]

    def _term(self, stored: StoredBatch) -> Path:
        return self._path(stored.batch.id) / str(stored.term)

    def _path(self, batch_id: str) -> Path:
        if not _ID.fullmatch(batch_id):
            raise no_such_batch(batch_id)
        return self._folder / batch_id
