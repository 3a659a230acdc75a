"""API keys: where they come from, and how a request's key is checked. Only their hashes are kept."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Iterable, MutableMapping
from pathlib import Path

import msgspec

from rayllm.config.options import ServerConfig
from rayllm.errors import ConfigError
from rayllm.serve.http.errors import unauthorized

KEY_VARIABLES = ("RAYLLM_API_KEYS", "RAYLLM_API_KEY")
MAX_KEYS = 1024  # every request is compared with each of them
MAX_KEY_CHARS = 512


class ApiKey(msgspec.Struct, frozen=True):
    """A key that clients may send. name: for logs. digest: sha256 of the key."""

    name: str
    digest: bytes


def load_api_keys(server: ServerConfig, environment: MutableMapping[str, str]) -> list[ApiKey]:
    """All keys of the config and of KEY_VARIABLES, which are removed from `environment` so that no child sees them.

    No keys at all: the server is open. Raises ConfigError for a file without any, or a key that no header can carry.
    """
    found: list[tuple[str, str]] = []  # (key, name or "")
    if server.api_key is not None:
        found.append((server.api_key, ""))
    for variable in KEY_VARIABLES:
        found += [(key, "") for key in environment.pop(variable, "").replace(",", " ").split()]
    if server.api_key_file is not None:
        found += _read_key_file(server.api_key_file)
    if len(found) > MAX_KEYS:
        raise ConfigError(f"there are {len(found)} API keys; at most {MAX_KEYS} are allowed")
    return [_api_key(key, name or f"key-{number}") for number, (key, name) in enumerate(found, start=1)]


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


def _api_key(key: str, name: str) -> ApiKey:
    """The messages of the errors do not show the key."""
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"API key {name!r} must be printable ASCII characters without spaces")
    if len(key) > MAX_KEY_CHARS:
        raise ConfigError(f"API key {name!r} has {len(key)} characters; at most {MAX_KEY_CHARS} are allowed")
    return ApiKey(name, hashlib.sha256(key.encode()).digest())


class Guard:
    """Checks the keys of requests. Without keys it lets everything pass."""

    def __init__(self, keys: Iterable[ApiKey]):
        self._keys = list(keys)

    def check(self, method: str, path: str, authorization: str | None) -> str | None:
        """The name of the key that a request came with; None where none is needed. Raises ApiError 401."""
        if not self._keys or path == "/health":
            return None
        # A browser that opens the page at / cannot send a bearer token, only a password. Nothing else takes passwords:
        # browsers send them on their own, also with requests that another site's page makes them send.
        by_password = path == "/" and method in ("GET", "HEAD")
        challenge = 'Basic realm="rayllm, API key as password"' if by_password else "Bearer"
        scheme, _, credentials = (authorization or "").strip().partition(" ")
        key = ""
        if scheme.lower() == "bearer":
            key = credentials.strip()
        elif scheme.lower() == "basic" and by_password:
            key = _password(credentials)
        if not key:
            raise unauthorized("no API key: send it as `Authorization: Bearer <key>`", challenge)
        name = self._name_of(hashlib.sha256(key.encode(errors="surrogateescape")).digest())
        if name is None:
            raise unauthorized("the API key is not valid", challenge)
        return name

    def _name_of(self, digest: bytes) -> str | None:
        """Takes the same time whichever key it is, and whether it is one."""
        name = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                name = key.name
        return name


def _password(credentials: str) -> str:
    try:
        return base64.b64decode(credentials.strip(), validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return ""
