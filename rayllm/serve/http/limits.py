"""What a request must pass: its API key, admission, and deadlines.

Keys: only their hashes are kept.

Admission: a completion is *live* from its request's arrival until the engine is done with it. At most `max_running`
(what a model's engines run at once) + `max_queued_requests` completions are live, and at most `max_queued_tokens`
prompt tokens wait for their first token; a request that would exceed either is refused at once. A request is never
refused for its own size: one that comes alone is always let in, as it would be refused for ever otherwise. Each model
has limits of its own; until a request's body says which model it is for, it counts among those that have arrived, for
all models together.

One front's limits hold exactly. The live work of the other fronts is known from figures up to a second old, so N fronts
together may exceed a limit by what they let in within that second, at most N times the limit.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
from collections.abc import AsyncIterator, Callable, Iterable, MutableMapping
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from rayllm import timeouts
from rayllm.api.types import Load
from rayllm.config.options import ModelServerConfig, ServerConfig
from rayllm.errors import ConfigError
from rayllm.serve.http.errors import ApiError

KEY_VARIABLES = ("RAYLLM_API_KEYS", "RAYLLM_API_KEY")
MAX_KEYS = 1024  # every request is compared with each of them
MAX_KEY_CHARS = 512
# Deadlines of a prompt in the order in which it meets them, and what is said when one is missed.
_DEADLINES = {
    "queue_timeout": "the engine did not start the request within {:g} s (queue_timeout)",
    "first_token_timeout": "there was no first token within {:g} s (first_token_timeout)",
    "request_timeout": "the answer was not complete within {:g} s (request_timeout)",
}


# ---- keys


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
        """The name of the key that a request came with; None where none is needed. Raises ApiError 401.

        It takes the same time whichever key it is, and whether it is one.
        """
        if not self._keys or path == "/health":
            return None
        # A browser that opens the page at / cannot send a bearer token, only a password. Nothing else takes passwords:
        # browsers send them on their own, also with requests that another site's page makes them send.
        by_password = path == "/" and method in ("GET", "HEAD")
        scheme, _, credentials = (authorization or "").strip().partition(" ")
        key = credentials.strip() if scheme.lower() == "bearer" else ""
        if scheme.lower() == "basic" and by_password:
            key = _password(credentials)
        digest = hashlib.sha256(key.encode(errors="surrogateescape")).digest()
        if names := [each.name for each in self._keys if hmac.compare_digest(each.digest, digest)]:
            return names[0]
        raise ApiError(
            401,
            "the API key is not valid" if key else "no API key: send it as `Authorization: Bearer <key>`",
            code="invalid_api_key",
            headers={"www-authenticate": 'Basic realm="rayllm, API key as password"' if by_password else "Bearer"},
        )


def _password(credentials: str) -> str:
    try:
        return base64.b64decode(credentials.strip(), validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return ""


# ---- admission


class Admission:
    """This front's live work against its limits.

    max_running: completions that the engines run at once; it may change as replicas come and go.
    """

    def __init__(self, server: ModelServerConfig, max_running: int):
        self.max_running = max_running
        self.load = Load()  # this front's own
        self.others = Load()  # of the other fronts, as last heard
        self._max_queued = server.max_queued_requests
        self._max_tokens = server.max_queued_tokens

    @property
    def max_live(self) -> int:
        """Completions that may be live."""
        return self.max_running + self._max_queued

    def enter(self) -> Ticket:
        """Take in an HTTP request, as one completion as long as nobody knows more. Raises ApiError 429."""
        self.reserve(1, 0)
        return Ticket(self, 1)

    def reserve(self, completions: int, tokens: int, own: int = 0) -> None:
        """Add to the load. own: completions that the same request holds already. Raises ApiError 429."""
        live = self.load.completions + self.others.completions
        if live > own and live + completions > self.max_live:
            limit = f"{self.max_running} running and {self._max_queued} queued completions"
            raise _queue_full(f"the server has {live} completions, and takes {limit}")
        waiting = self.load.queued_tokens + self.others.queued_tokens
        if waiting and waiting + tokens > self._max_tokens:
            raise _queue_full(
                f"{waiting} prompt tokens wait and the request has {tokens}; at most {self._max_tokens} may wait"
            )
        self.release(-completions, -tokens)

    def release(self, completions: int, tokens: int) -> None:
        """Take from the load."""
        self.load += Load(-completions, -tokens)


class Ticket:
    """One HTTP request's share of the load. `close` gives it back and may be called more than once."""

    def __init__(self, admission: Admission, completions: int):
        self._admission = admission
        self._completions = completions
        self._tokens = 0

    def move(self, admission: Admission) -> None:
        """Hold the same share of another load instead. Raises ApiError 429, and keeps the old one then."""
        if admission is not self._admission:
            admission.reserve(self._completions, self._tokens)
            self._admission.release(self._completions, self._tokens)
            self._admission = admission

    def admit(self, completions: int, tokens: int) -> None:
        """Settle how much it is, once the body is known. Raises ApiError 429."""
        self._admission.reserve(completions - self._completions, tokens, own=self._completions)
        self._completions, self._tokens = completions, tokens

    def release(self, completions: int = 0, tokens: int = 0) -> None:
        """So many of its completions have ended; prompts of so many tokens have had their first token."""
        completions, tokens = min(completions, self._completions), min(tokens, self._tokens)
        self._completions -= completions
        self._tokens -= tokens
        self._admission.release(completions, tokens)

    def close(self) -> None:
        """All of it has ended."""
        self.release(self._completions, self._tokens)


def _queue_full(message: str) -> ApiError:
    return ApiError(429, message, code="queue_full")


# ---- deadlines


class Deadlines:
    """One HTTP request's deadlines, counted from its arrival. Made then, in an event loop."""

    def __init__(self, server: ServerConfig):
        self._arrival = asyncio.get_running_loop().time()
        self._seconds: dict[str, float] = {name: getattr(server, name) for name in _DEADLINES}
        self.body_s = min(timeouts.BODY_S, server.request_timeout or timeouts.BODY_S)  # counted from when it is read

    @property
    def limits_queue(self) -> bool:
        """Whether it matters when the engine starts a prompt."""
        return self._seconds["queue_timeout"] > 0

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[Callable[[str], None]]:
        """A block that runs one prompt; it calls what it gets with the name of each deadline that is met.

        Raises ApiError 408 at the first that is missed.
        """
        pending = {name: self._arrival + seconds for name, seconds in self._seconds.items() if seconds}

        def met(name: str) -> None:
            if pending.pop(name, None) is not None:
                timeout.reschedule(min(pending.values(), default=None))

        try:
            async with asyncio.timeout_at(min(pending.values(), default=None)) as timeout:
                yield met
        except TimeoutError:
            if not timeout.expired():
                raise
            name = min(pending, key=pending.__getitem__)
            raise ApiError(408, _DEADLINES[name].format(self._seconds[name]), code=name) from None
