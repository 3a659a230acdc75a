"""The page at `/`: a console to chat with the served model and to watch the server's figures.

`console.html` is the whole of it: no other file, no other host. The browser holds it to that, because the policy sent
along allows the page's own script and style by their hashes, requests to this server only, and no HTML made from text.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.resources
import re

from starlette.responses import Response


def console_page() -> Response:
    """The page, the same for everyone: it holds no secrets, and its own requests carry the user's key."""
    page, policy = _page_and_policy()
    headers = {
        "content-security-policy": policy,
        "cache-control": "no-cache",
        "cross-origin-opener-policy": "same-origin",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
    return Response(page, headers=headers, media_type="text/html")


@functools.cache
def _page_and_policy() -> tuple[str, str]:
    page = importlib.resources.files("rayllm.serve.http").joinpath("console.html").read_text(encoding="utf-8")
    policy = {
        "default-src": "'none'",
        "script-src": _hash_of("script", page),
        "style-src": _hash_of("style", page),
        "connect-src": "'self'",
        "img-src": "data:",  # the empty icon
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    return page, "; ".join(f"{name} {value}" for name, value in policy.items())


def _hash_of(tag: str, page: str) -> str:
    """The CSP source of the page's one inline element `tag`: the hash of its text."""
    (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
