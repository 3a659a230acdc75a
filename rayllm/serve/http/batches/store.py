"""`BatchStore`: the batches of /v1/batches in a folder, which all API servers share that have the same one.

    <id>/batch.json      the batch; written by whoever works on it
    <id>/cancel          it is to be cancelled
    <id>/results.jsonl   results so far, a `ResultFile`; who has it open works on the batch

Methods read and write files, and belong into threads.
"""

from __future__ import annotations

import re
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from rayllm.serve.http.batches.files import FOLDER_MODE, FileLimits, FileStore, write_whole
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
    """A batch. owner: the name of the API key that it belongs to, or "". output_ttl: seconds that its results stay."""

    owner: str
    batch: Batch
    output_ttl: float | None = None


def no_such_batch(batch_id: str) -> ApiError:
    """A batch that there is not, or that is another's."""
    return ApiError(404, f"there is no batch {batch_id[:64]!r}", code="batch_not_found", param="batch_id")


class BatchStore:
    """All batches of a folder, and the files of clients beside them."""

    def __init__(self, folder: Path, limits: FileLimits = FileLimits(), clock: Callable[[], float] = time.time):
        self.files, self.clock = FileStore(folder / "files", limits, clock), clock
        self._folder = folder / "batches"

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
        if len(self.ids()) >= MAX_BATCHES:
            raise ApiError(429, f"the server keeps {MAX_BATCHES} batches already", code="too_many_batches")
        now = int(self.clock())
        batch = Batch(
            id=f"batch_{secrets.token_hex(16)}",
            endpoint=endpoint,
            input_file_id=input_file_id,
            completion_window=window,
            created_at=now,
            expires_at=now + WINDOW_S,
            metadata=metadata,
        )
        self._path(batch.id).mkdir(FOLDER_MODE, parents=True)
        self.save(StoredBatch(owner, batch, output_ttl))
        return batch

    def save(self, stored: StoredBatch) -> None:
        """Write it; only who works on it may do so."""
        write_whole(self._path(stored.batch.id) / "batch.json", msgspec.json.encode(stored))

    def load(self, batch_id: str) -> StoredBatch | None:
        """A batch as it is now, whoever owns it; None if there is none."""
        folder = self._path(batch_id)
        try:
            text = (folder / "batch.json").read_bytes()
        except FileNotFoundError:
            return None
        stored = msgspec.json.decode(text, type=StoredBatch)
        cancel = folder / "cancel"
        if not stored.batch.has_ended and cancel.exists():
            stored.batch.status, stored.batch.cancelling_at = "cancelling", int(cancel.stat().st_mtime)
        return stored

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
        stored = [self.load(batch_id) for batch_id in self.ids()]
        batches = [each.batch for each in stored if each is not None and each.owner == owner]
        return sorted(batches, key=lambda batch: (batch.created_at, batch.id), reverse=True)

    def ids(self) -> list[str]:
        """Of all batches."""
        return [path.name for path in self._folder.glob("batch_*")]

    def results(self, batch_id: str) -> Path:
        """Where its results so far are."""
        return self._path(batch_id) / "results.jsonl"

    def sweep(self) -> None:
        """Remove batches that have ended long ago, and files that are too old."""
        for batch_id in self.ids():
            stored = self.load(batch_id)
            if stored is not None and stored.batch.has_ended:
                path = self._path(batch_id)
                if self.clock() - (path / "batch.json").stat().st_mtime > self.files.limits.ttl:
                    shutil.rmtree(path, ignore_errors=True)
        self.files.sweep()

    def _path(self, batch_id: str) -> Path:
        if not _ID.fullmatch(batch_id):
            raise no_such_batch(batch_id)
        return self._folder / batch_id
