"""Lines of a batch: requests in, results out, in the form of OpenAI's Batch API.

    in   {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
    out  {"id": "batch_req_...", "custom_id": "a", "response": {"status_code", "request_id", "body"}, "error": null}

Every line of the input that is not blank has one result, a line that is no request too: its `response` is null then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Collection
from hashlib import blake2b
from typing import Annotated, Any, Literal

import msgspec
import orjson

MAX_LINE_BYTES = 36 * 2**20  # more than the longest body that a server takes
MAX_CUSTOM_ID_CHARS = 512
_HASH_BYTES = 16
_BOM = b"\xef\xbb\xbf"


class BatchRequest(msgspec.Struct, frozen=True):
    """A request of a batch. id: of its result, the same in each run. body: as JSON."""

    id: str
    custom_id: str
    url: str
    body: bytes


class Response(msgspec.Struct, frozen=True):
    """What the API answered. body: JSON."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class Failure(msgspec.Struct, frozen=True):
    """Why there is no response."""

    code: str
    message: str


class BatchResult(msgspec.Struct, frozen=True):
    """What a line of the output says. custom_id: None if the input's line has none that can be read."""

    id: str
    custom_id: str | None
    response: Response | None
    error: Failure | None

    @property
    def succeeded(self) -> bool:
        return self.response is not None and self.response.status_code == 200

    def line(self) -> bytes:
        """As JSON with a line's end."""
        return msgspec.json.encode(self) + b"\n"


def answered(request: BatchRequest, status: int, body: bytes) -> BatchResult:
    """The result of a request that was answered. body: JSON."""
    return BatchResult(request.id, request.custom_id, Response(status, request.id, msgspec.Raw(body)), None)


def failed(request: BatchRequest, code: str, message: str) -> BatchResult:
    """The result of a request that was not sent."""
    return BatchResult(request.id, request.custom_id, None, Failure(code, message))


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    custom_id: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_CUSTOM_ID_CHARS)]
    url: str
    body: msgspec.Raw
    method: Literal["POST"] = "POST"


class _Body(msgspec.Struct):
    stream: Any = None
    background: Any = None


class _WholeLine(msgspec.Struct):
    body: _Body


_read_line = msgspec.json.Decoder(_Line).decode
_read_body = msgspec.json.Decoder(_WholeLine).decode


class LineReader:
    """Makes requests of the lines of one input, one after the other.

    The id of a line follows from its text, and for a text or a custom_id that came before from how often it did: so it
    is the same in each run, wherever in the input the line is. What was seen is kept as hashes of 16 bytes.

    endpoints: the urls that requests may have.
    """

    def __init__(self, endpoints: Collection[str]):
        self._endpoints = endpoints
        self._seen: set[bytes] = set()
        self._repeats: Counter[bytes] = Counter()

    def read(self, line: bytes) -> BatchRequest | BatchResult:
        """The request in a line, or the result of a line that is none."""
        if len(line) > MAX_LINE_BYTES:
            reason = f"the line is longer than {MAX_LINE_BYTES} bytes"
            return self._refuse(line, None, Failure("line_too_long", reason))
        try:
            parsed = _read_line(line)
            body = _read_body(line).body
        except msgspec.ValidationError as error:
            custom_id = _custom_id(line)
            return self._refuse(line, custom_id, Failure("invalid_request", f"the line is no request: {error}"))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return self._refuse(line, None, Failure("invalid_json", f"the line is not valid JSON: {error}"))
        if parsed.url not in self._endpoints:
            reason = f"url must be one of {', '.join(self._endpoints)}, not {parsed.url[:200]!r}"
            return self._refuse(line, parsed.custom_id, Failure("invalid_url", reason))
        if body.stream:
            reason = "stream: a batch has no streams; leave it out"
            return self._refuse(line, parsed.custom_id, Failure("stream_not_supported", reason))
        if body.background:
            reason = "background: a batch waits for its answers; leave it out"
            return self._refuse(line, parsed.custom_id, Failure("background_not_supported", reason))
        if repeats := self._count(_hash(b"custom_id", parsed.custom_id.encode())):
            reason = f"custom_id {parsed.custom_id!r} came before in this input"
            failure = Failure("duplicate_custom_id", reason)
            return BatchResult(_id(line, repeats), parsed.custom_id, None, failure)
        return BatchRequest(_id(line, 0), parsed.custom_id, parsed.url, bytes(parsed.body))

    def _refuse(self, line: bytes, custom_id: str | None, failure: Failure) -> BatchResult:
        return BatchResult(_id(line, self._count(_hash(b"line", line))), custom_id, None, failure)

    def _count(self, key: bytes) -> int:
        """How often this came before."""
        if key not in self._seen:
            self._seen.add(key)
            return 0
        self._repeats[key] += 1
        return self._repeats[key]


def _id(line: bytes, repeats: int) -> str:
    return "batch_req_" + _hash(str(repeats).encode(), line).hex()


def _hash(kind: bytes, text: bytes) -> bytes:
    return blake2b(text, digest_size=_HASH_BYTES, key=kind).digest()


def _custom_id(line: bytes) -> str | None:
    """Of a line that is JSON but no request."""
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError:  # what comes behind the fault is no JSON, or none that this library takes
        return None
    custom_id = value.get("custom_id") if isinstance(value, dict) else None
    return custom_id[:MAX_CUSTOM_ID_CHARS] if isinstance(custom_id, str) else None


async def split_lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The lines of a text that comes in chunks, without their ends, blank ones left out.

    No more than MAX_LINE_BYTES + 1 bytes of a line are kept.
    """
    parts: list[bytes] = []
    size, is_first = 0, True

    def end() -> bytes:
        nonlocal parts, size, is_first
        line = b"".join(parts)
        if is_first:
            line = line.removeprefix(_BOM)
        parts, size, is_first = [], 0, False
        return line.strip()

    async for chunk in chunks:
        *ended, rest = chunk.split(b"\n")
        for piece in ended:
            parts.append(piece[: MAX_LINE_BYTES + 1 - size])
            if line := end():
                yield line
        parts.append(rest[: MAX_LINE_BYTES + 1 - size])
        size += len(parts[-1])
    if line := end():
        yield line
