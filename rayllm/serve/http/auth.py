"""Who may send requests: whoever has one of the API keys, and no web page of another origin.

Only hashes of the keys are kept.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from starlette.datastructures import Headers

from rayllm.config.options import ServerConfig
from rayllm.errors import ConfigError
from rayllm.serve.http.errors import ApiError, is_anthropic

KEY_VARIABLES = ("RAYLLM_API_KEYS", "RAYLLM_API_KEY")
MAX_KEYS = 1024  # every request is compared with each of them
MAX_KEY_CHARS = 512


class ApiKey(msgspec.Struct, frozen=True):
    """A key that clients may send. name: for logs. digest: sha256 of the key."""

    name: str
    digest: bytes


def load_api_keys(server: ServerConfig, environment: MutableMapping[str, str]) -> list[ApiKey]:
    """All keys of the config and of KEY_VARIABLES, which are removed from `environment` so that no child sees them.

    No keys at all: the server is open. Raises ConfigError for a file or a variable without any, which was hardly meant
    to open it, and for a key that no header can carry.
    """
    found: list[tuple[str, str]] = []  # (key, name or "")
    if server.api_key is not None:
        found.append((server.api_key, ""))
    for variable in KEY_VARIABLES:
        if (told := environment.pop(variable, None)) is None:
            continue
        if not (keys := told.replace(",", " ").split()):
            raise ConfigError(f"{variable} is set, but has no key in it; without keys it must not be set")
        found += [(key, "") for key in keys]
    if server.api_key_file is not None:
        found += _read_key_file(server.api_key_file)
    if len(found) > MAX_KEYS:
        raise ConfigError(f"there are {len(found)} API keys; at most {MAX_KEYS} are allowed")
    return [_api_key(key, name, number) for number, (key, name) in enumerate(found, start=1)]


def _read_key_file(path: str) -> list[tuple[str, str]]:
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"api_key_file {path} cannot be read: {reason}") from None
    parts = [line.split(maxsplit=1) for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not parts:
        raise ConfigError(f"api_key_file {path} has no keys in it")
    return [(key, name[0].strip() if name else "") for key, *name in parts]


def _api_key(key: str, given: str, number: int) -> ApiKey:
    """A key without a name is named by its hash. The messages of the errors do not show the key.

    What a key owns is kept by its name, which must not become another key's when keys come and go.
    """
    name = given or f"number {number}"
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"API key {name!r} must be printable ASCII characters without spaces")
    if len(key) > MAX_KEY_CHARS:
        raise ConfigError(f"API key {name!r} has {len(key)} characters; at most {MAX_KEY_CHARS} are allowed")
    digest = hashlib.sha256(key.encode()).digest()
    return ApiKey(given or name_of(digest), digest)


def name_of(digest: bytes) -> str:
    """Of a key without a name. It tells nobody the digest."""
    return f"key-{hashlib.sha256(b'rayllm name' + digest).hexdigest()[:12]}"


def check_key(
    keys: Sequence[ApiKey], method: str, path: str, authorization: str | None, x_api_key: str | None = None
) -> str | None:
    """The name of the key that a request came with; None where none is needed. Raises ApiError 401.

    authorization, x_api_key: these headers. The latter counts only where Anthropic's clients send it.

    Without keys, none is needed anywhere; /health needs none, and says more to who has one. It takes the same time
    whichever key it is, and whether it is one.
    """
    if not keys:
        return None
    # A browser that opens the console cannot send a bearer token, only a password. Nothing else takes passwords:
    # browsers send them on their own, also with requests that another site's page makes them send.
    by_password = (path == "/" or path.startswith("/console/")) and method in ("GET", "HEAD")
    scheme, _, credentials = (authorization or "").strip().partition(" ")
    key = credentials.strip() if scheme.lower() == "bearer" else ""
    if scheme.lower() == "basic" and by_password:
        key = _password(credentials)
    if not key and is_anthropic(path):
        key = (x_api_key or "").strip()
    digest = hashlib.sha256(key.encode(errors="surrogateescape")).digest()
    if names := [each.name for each in keys if hmac.compare_digest(each.digest, digest)]:
        return names[0]
    if path == "/health":
        return None
    how = "`Authorization: Bearer <key>`" + (" or `x-api-key: <key>`" if is_anthropic(path) else "")
    raise ApiError(
        401,
        "the API key is not valid" if key else f"no API key: send it as {how}",
        code="invalid_api_key",
        headers={"www-authenticate": 'Basic realm="rayllm, API key as password"' if by_password else "Bearer"},
    )


def check_origin(allowed: Sequence[str], method: str, headers: Headers) -> None:
    """Raises ApiError 403 for what a page of another origin had a browser send.

    Browsers send some requests to any server without asking it ("simple" ones, as text/plain), with all that they do.
    """
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    if method in ("GET", "HEAD", "OPTIONS") or "*" in allowed or origin in allowed:
        return
    if site is None:  # an old browser, or one that reaches this server without TLS by another name than localhost
        is_own = origin is None or urlsplit(origin).netloc == headers.get("host")
    else:
        is_own = site in ("same-origin", "none")  # none: by the user, not by a page
    if not is_own:
        message = f"requests from web pages of {str(origin)[:200]} are not allowed (option allowed_origins)"
        raise ApiError(403, message, code="origin_not_allowed")


def _password(credentials: str) -> str:
    try:
        return base64.b64decode(credentials.strip(), validate=True).decode().partition(":")[2]
    except ValueError:
        return ""
