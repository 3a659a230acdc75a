"""The page at `/`: a console to chat with the served model and to watch the server's figures.

`console.html` is the whole of it: no other file, no other host. The browser holds it to that, because the policy sent
along allows the page's own script and style by their hashes, requests to this server only, and no HTML made from text.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import re

from starlette.responses import HTMLResponse, Response

_PAGE = importlib.resources.files("rayllm.serve.http").joinpath("console.html").read_text(encoding="utf-8")


def _hash_of(tag: str) -> str:
    """The CSP source of the page's one inline element `tag`: the hash of its text."""
    (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", _PAGE, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


_POLICY = (
    f"default-src 'none'; script-src {_hash_of('script')}; style-src {_hash_of('style')}; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "  # data: is the empty icon
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "cache-control": "no-cache",
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def console_page() -> Response:
    """The page, the same for everyone: it holds no secrets, and its own requests carry the user's key."""
    return HTMLResponse(_PAGE, headers=_HEADERS)
