"""A stand-in of the Hugging Face Hub: the paths that huggingface_hub asks when it downloads a model, over HTTP."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

NAME = r"[\w.-]+(?:/[\w.-]+)?"


@dataclass
class Repository:
    """One model. revisions: branch or tag -> folder with its files; a commit is a hash of the folder's path."""

    revisions: dict[str, Path]
    # That a request needs for files; None lets everybody have them.
    token: str | None = None

    @staticmethod
    def commit(folder: Path) -> str:
        return hashlib.sha1(str(folder).encode()).hexdigest()

    def folder(self, revision: str) -> Path | None:
        """Of a branch, a tag or a commit."""
        commits = {self.commit(folder): folder for folder in self.revisions.values()}
        return self.revisions.get(revision) or commits.get(revision)


@dataclass
class Request:
    method: str
    # Without the query.
    path: str
    # First byte that was asked for.
    start: int = 0

    @property
    def file(self) -> str | None:
        """The file of a download."""
        found = re.fullmatch(f"/{NAME}/resolve/[^/]+/(.+)", self.path)
        return found[1] if found and self.method == "GET" else None


@dataclass
class HubStandIn:
    """The server. It counts what it is asked, and breaks off where it is told to."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    # File -> bytes after which each download of it breaks off, as often as there are numbers.
    breaks: dict[str, list[int]] = field(default_factory=dict)
    # Files that are not handed out for now.
    failing: set[str] = field(default_factory=set)
    # What every request is answered with, instead.
    status: int | None = None

    def __enter__(self) -> HubStandIn:
        hub = self

        class Handler(_Handler):
            stand_in = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def downloads(self) -> list[str]:
        """The files that were downloaded since the last call, whole or not."""
        files = [request.file for request in self.requests if request.file]
        self.requests.clear()
        return files


class _Handler(BaseHTTPRequestHandler):
    stand_in: HubStandIn
    protocol_version = "HTTP/1.1"

    def log_message(self, *_args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        first = re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(first[1]) if first else 0
        self.stand_in.requests.append(Request(self.command, path, start))
        if self.stand_in.status is not None:
            return self._refuse(self.stand_in.status, "")
        found = re.fullmatch(
            f"/api/models/(?P<name>{NAME})(?:/(?P<what>revision|tree)/(?P<revision>[^/]+))?", path
        ) or re.fullmatch(f"/(?P<name>{NAME})/(?P<what>resolve)/(?P<revision>[^/]+)/(?P<file>.+)", path)
        if found is None:
            return self._refuse(404, "EntryNotFound")
        repository = self.stand_in.repositories.get(found["name"])
        if repository is None:
            return self._refuse(401, "RepoNotFound")  # as the hub does, which does not tell private from absent
        folder = repository.folder(found["revision"] or "main")
        if folder is None:
            return self._refuse(404, "RevisionNotFound")
        match found["what"]:
            case "resolve":
                self._send_file(repository, folder, found["file"], start)
            case "tree":
                self._send_json([_entry(folder, path) for path in _files(folder)])
            case _:
                self._send_json({"id": found["name"], "sha": repository.commit(folder), "siblings": []})

    def _send_file(self, repository: Repository, folder: Path, name: str, start: int) -> None:
        if repository.token is not None and self.headers.get("Authorization") != f"Bearer {repository.token}":
            return self._refuse(403 if "Authorization" in self.headers else 401, "GatedRepo")
        path = folder / name
        if not path.is_file():
            return self._refuse(404, "EntryNotFound")
        if name in self.stand_in.failing and self.command == "GET":
            return self._refuse(500, "")
        data = path.read_bytes()
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("X-Repo-Commit", repository.commit(folder))
        self.send_header("ETag", f'"{_etag(path)}"')
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        if self.command == "HEAD":
            return None
        if left := self.stand_in.breaks.get(name):  # as a connection does that is lost
            self.wfile.write(data[start : left.pop(0)])
            self.wfile.flush()
            self.close_connection = True
            self.connection.shutdown(2)
            return None
        self.wfile.write(data[start:])

    def _send_json(self, document: object) -> None:
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def _etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


def _entry(folder: Path, path: Path) -> dict[str, object]:
    name = path.relative_to(folder).as_posix()
    return {"type": "file", "path": name, "size": path.stat().st_size, "oid": _etag(path)}
