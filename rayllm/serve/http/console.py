"""The console in the browser: the page at `/` and its files below `/console/`, which are in the folder `console`.

They need no other host, and the browser holds them to that: the policy sent along allows scripts, styles, fonts and
requests of this server only, and no markup but what DOMPurify has cleaned.
"""

from __future__ import annotations

import hashlib
import importlib.resources
from importlib.resources.abc import Traversable
from typing import NamedTuple

from starlette.responses import Response

from rayllm.serve.http.errors import ApiError

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "mjs": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "woff2": "font/woff2",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self'; img-src 'self' data:; "
    # KaTeX gives some parts of a formula their width by an attribute `style`. A model's text cannot make one.
    "style-src-attr 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify"
)
_HEADERS = {
    "cache-control": "no-cache",  # kept, and asked about at each use
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class _File(NamedTuple):
    """A file of the console and the headers that go with it."""

    content: bytes
    headers: dict[str, str]


def _read(folder: Traversable, prefix: str = "") -> dict[str, _File]:
    """All files of a folder that browsers have a use for, by their paths in it."""
    found: dict[str, _File] = {}
    for entry in folder.iterdir():
        if entry.is_dir():
            found |= _read(entry, f"{prefix}{entry.name}/")
        elif (kind := _TYPES.get(entry.name.rpartition(".")[2])) is not None:
            content = entry.read_bytes()
            headers = {"content-type": kind, "etag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'} | _HEADERS
            if entry.name.endswith(".html"):
                headers["content-security-policy"] = _POLICY
            found[f"{prefix}{entry.name}"] = _File(content, headers)
    return found


_PAGE = "index.html"
_FILES = _read(importlib.resources.files("rayllm.serve.http").joinpath("console"))


def console_file(path: str = _PAGE, known: str | None = None) -> Response:
    """A file of the console, the same for everyone: none holds secrets, and the page's requests carry the user's key.

    known: the request's header if-none-match; if it names the file as it is, the answer is 304. Raises ApiError 404.
    """
    file = _FILES.get(path)
    if file is None:
        raise ApiError(404, "the console has no such file")
    if known is not None and file.headers["etag"] in known:
        return Response(status_code=304, headers=file.headers)
    return Response(file.content, headers=file.headers)
