"""`FileStore`: the files of /v1/files in a folder, which all API servers share that have the same one.

    <id>.json   what is known of a file; written last, so that a file is there as a whole or not at all
    <id>.data   its content

Methods read and write files, and belong into threads.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

import msgspec

from rayllm.serve.http.errors import ApiError

FOLDER_MODE = 0o700
MAX_FILES = 10_000
MAX_FILENAME_CHARS = 255
COPY_BYTES = 2**20
STALE_S = 3600.0  # a content without its record is of an upload that broke off by then
MIB = 2**20

_ID = re.compile(r"file-[0-9a-f]{32}")  # nothing else becomes part of a path

Purpose = Literal["batch", "batch_output"]


class FileObject(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's File object. Times are Unix times in seconds."""

    id: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Purpose
    object: Literal["file"] = "file"
    status: Literal["processed"] = "processed"


class StoredFile(msgspec.Struct, frozen=True):
    """A file. owner: the name of the API key that it belongs to, or ""."""

    owner: str
    file: FileObject


class FileLimits(NamedTuple):
    """Bytes of one file and of all; seconds that a file is kept."""

    file_bytes: int = 200 * MIB
    total_bytes: int = 10 * 1024 * MIB
    ttl: float = 30 * 86400


def no_such_file(file_id: str) -> ApiError:
    """A file that there is not, or that is another's."""
    return ApiError(404, f"there is no file {file_id[:64]!r}", code="file_not_found", param="file_id")


class FileStore:
    """All files of a folder."""

    def __init__(self, folder: Path, limits: FileLimits = FileLimits(), clock: Callable[[], float] = time.time):
        self.limits = limits
        self._folder, self._clock = folder, clock

    def add(
        self, content: BinaryIO, filename: str, purpose: Purpose, owner: str, ttl: float | None = None
    ) -> FileObject:
        """Keep a file that was uploaded, for ttl seconds at most. Raises ApiError 413 if there is no room for it."""
        size = content.seek(0, os.SEEK_END)
        content.seek(0)
        if size > self.limits.file_bytes:
            message = f"file: it has {size} bytes; at most {self.limits.file_bytes} are allowed (max_file_mib)"
            raise ApiError(413, message, code="file_too_large", param="file")
        held = self._sizes()
        if sum(held) + size > self.limits.total_bytes or len(held) >= MAX_FILES:
            message = f"the server keeps {len(held)} files with {sum(held)} bytes, and has no room for {size} more"
            raise ApiError(413, f"{message} (file_space); delete files first", code="storage_full", param="file")
        file_id = f"file-{secrets.token_hex(16)}"
        return self.put(file_id, iter(lambda: content.read(COPY_BYTES), b""), filename, purpose, owner, ttl)

    def put(
        self,
        file_id: str,
        content: Iterable[bytes],
        filename: str,
        purpose: Purpose,
        owner: str,
        ttl: float | None = None,
    ) -> FileObject:
        """Keep a file under this id, however long it is; one of before is replaced."""
        self._folder.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
        size, data = 0, self._path(file_id, ".data")
        with open(data, "wb", opener=_private) as file:
            for chunk in content:
                size += file.write(chunk)
        now = self._clock()
        found = FileObject(
            id=file_id,
            bytes=size,
            created_at=int(now),
            expires_at=int(now + min(self.limits.ttl, ttl or self.limits.ttl)),
            filename=filename[:MAX_FILENAME_CHARS],
            purpose=purpose,
        )
        write_whole(self._path(file_id, ".json"), msgspec.json.encode(StoredFile(owner, found)))
        return found

    def get(self, file_id: str, owner: str) -> FileObject:
        """What is known of a file. Raises ApiError 404."""
        stored = self._load(self._path(file_id, ".json"))
        if stored is None or stored.owner != owner:
            raise no_such_file(file_id)
        return stored.file

    def content(self, file_id: str, owner: str) -> Path:
        """Where a file's content is. Raises ApiError 404."""
        return self._path(self.get(file_id, owner).id, ".data")

    def delete(self, file_id: str, owner: str) -> None:
        """Raises ApiError 404."""
        self.discard(self.get(file_id, owner).id)

    def discard(self, file_id: str) -> None:
        """Remove a file, whoever owns it, if there is one."""
        self._path(file_id, ".json").unlink(missing_ok=True)
        self._path(file_id, ".data").unlink(missing_ok=True)

    def owned_by(self, owner: str) -> list[FileObject]:
        """All files of an owner, the newest first."""
        stored = (self._load(path) for path in self._folder.glob("file-*.json"))
        files = [each.file for each in stored if each is not None and each.owner == owner]
        return sorted(files, key=lambda file: (file.created_at, file.id), reverse=True)

    def sweep(self) -> None:
        """Remove what is too old, and what uploads that broke off have left."""
        for path in self._folder.glob("file-*.json"):
            if self._load(path) is None:
                self.discard(path.stem)
        for path in self._folder.glob("file-*.data"):
            try:
                is_old = self._clock() - path.stat().st_mtime > STALE_S
            except FileNotFoundError:
                continue
            if is_old and not path.with_suffix(".json").exists():
                path.unlink(missing_ok=True)

    def _sizes(self) -> list[int]:
        if not self._folder.exists():
            return []
        with os.scandir(self._folder) as entries:
            return [entry.stat().st_size for entry in entries if entry.name.endswith(".data")]

    def _load(self, path: Path) -> StoredFile | None:
        try:
            stored = msgspec.json.decode(path.read_bytes(), type=StoredFile)
        except FileNotFoundError:
            return None
        return None if stored.file.expires_at <= self._clock() else stored

    def _path(self, file_id: str, suffix: str) -> Path:
        if not _ID.fullmatch(file_id):
            raise no_such_file(file_id)
        return self._folder / f"{file_id}{suffix}"


def write_whole(path: Path, text: bytes) -> None:
    """Replace a file at once: readers find what it was before or what it is now, and nobody else may read it."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    with open(draft, "wb", opener=_private) as file:
        file.write(text)
    draft.replace(path)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
