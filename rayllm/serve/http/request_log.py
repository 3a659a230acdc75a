"""The request log: one record of each HTTP request, written when the engine gets it and when it ends.

Records never hold prompts, outputs or keys.
"""

from __future__ import annotations

import logging
import logging.handlers
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import orjson

LOGGER_NAME = "rayllm.requests"
LOG_FILE_BYTES = 64 * 2**20
LOG_FILES = 4

PLAIN = re.compile(r"[\w.:/+-]+", re.ASCII)  # text that needs no quotes
_NOT_LOGGED = ("arrival", "clock", "started")


class RequestRecord(msgspec.Struct, omit_defaults=True):
    """What is known of one HTTP request. Times in seconds."""

    request_id: str  # from the client or made here
    method: str
    path: str
    arrival: float = 0.0  # Unix time
    clock: float = 0.0  # time.perf_counter() at the arrival
    key: str | None = None  # the name of its API key
    model: str | None = None
    reply_id: str | None = None  # in the reply
    stream: bool = False
    status: int = 0
    error: str | None = None  # the code of the error it was answered with, in mid-stream too
    prompts: int = 0
    choices: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    queued: float | None = None  # in the engine, of the first prompt that had a token
    prefill: float | None = None  # of the same prompt
    first_token: float | None = None  # from the arrival
    total: float = 0.0  # from the arrival
    started: bool = False  # the engine has it


def log_event(event: str, record: RequestRecord) -> None:
    """Write a line. event: "start" for a request that the engine gets, "end" or "abort" for one that has ended."""
    fields = {name: value for name, value in msgspec.to_builtins(record).items() if name not in _NOT_LOGGED}
    rounded = {name: round(value, 6) if isinstance(value, float) else value for name, value in fields.items()}
    logging.getLogger(LOGGER_NAME).info(event, extra={"fields": rounded})


def open_log(log_format: str, path: Path | None) -> None:
    """Write the records of this process to a file, or to standard error; bounded: LOG_FILES files of LOG_FILE_BYTES."""
    handler: logging.Handler
    if path is None:
        handler = logging.StreamHandler()
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.handlers.RotatingFileHandler(path, maxBytes=LOG_FILE_BYTES, backupCount=LOG_FILES - 1)
    handler.setFormatter(_JsonLines() if log_format == "json" else _TextLines())
    logger = logging.getLogger(LOGGER_NAME)
    for old in list(logger.handlers):
        logger.removeHandler(old)
        old.close()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


class _JsonLines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        return orjson.dumps(_fields(record), default=str).decode()


class _TextLines(logging.Formatter):
    """time event name=value ...; a value that is not plain is quoted, so that nobody can forge a line or a field."""

    def format(self, record: logging.LogRecord) -> str:
        time, event, *fields = _fields(record).items()
        return " ".join([time[1], event[1], *(f"{name}={_quoted(str(value))}" for name, value in fields)])


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return {"time": time, "event": record.getMessage(), **getattr(record, "fields", {})}


def _quoted(text: str) -> str:
    return text if PLAIN.fullmatch(text) else orjson.dumps(text).decode()
