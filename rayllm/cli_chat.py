"""`rayllm chat`: a conversation with a running server in the terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import httpx

from rayllm.errors import EngineDeadError, InvalidRequestError

_TIMEOUT = httpx.Timeout(10, read=600)


class Chat:
    """Keeps the conversation; each answer is streamed to standard output as it comes.

    url: of the server, with or without /v1. model: None takes the first that the server lists.
    """

    def __init__(self, url: str, model: str | None, system: str | None, max_tokens: int | None, temperature: float):
        self._base = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._model = model
        self._start = [{"role": "system", "content": system}] if system else []
        self._options = {"temperature": temperature} | ({} if max_tokens is None else {"max_tokens": max_tokens})
        self._messages = list(self._start)

    def run(self) -> None:
        """Read lines until the end. Raises EngineDeadError if the server does not answer or breaks off."""
        try:
            with httpx.Client(timeout=_TIMEOUT) as client:
                self._run(client)
        except httpx.HTTPError as error:
            raise EngineDeadError(f"no answer from {self._base}: {error or type(error).__name__}") from None

    def _run(self, client: httpx.Client) -> None:
        if self._model is None:
            answer = client.get(f"{self._base}/models")
            _check(answer)
            self._model = answer.json()["data"][0]["id"]
        print(f"{self._model} at {self._base}; an empty line leaves, /reset starts anew", file=sys.stderr)
        for line in _lines():
            if line == "/reset":
                self._messages = list(self._start)
                continue
            self._messages.append({"role": "user", "content": line})
            try:
                text = self._answer(client)
            except (InvalidRequestError, KeyboardInterrupt) as error:
                self._messages.pop()  # as if it had not been asked
                print(f"error: {error}" if isinstance(error, InvalidRequestError) else "", file=sys.stderr)
            else:
                self._messages.append({"role": "assistant", "content": text})

    def _answer(self, client: httpx.Client) -> str:
        body = {"model": self._model, "messages": self._messages, "stream": True, **self._options}
        parts = []
        with client.stream("POST", f"{self._base}/chat/completions", json=body) as response:
            if response.status_code != 200:
                response.read()
                _check(response)
            for event in _events(response):
                if "error" in event:
                    raise EngineDeadError(event["error"]["message"])
                for choice in event["choices"]:
                    text = choice["delta"].get("content") or ""
                    parts.append(text)
                    print(text, end="", flush=True)
        print()
        return "".join(parts)


def _lines() -> Iterator[str]:
    """What the user types, up to an empty line, /exit or the end of input."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if line in ("", "/exit", "/quit"):
            return
        yield line


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[6:])


def _check(response: httpx.Response) -> None:
    """Raise what an error response says: InvalidRequestError for 4xx, EngineDeadError for 5xx."""
    if response.status_code == 200:
        return
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = f"status {response.status_code}"
    raise (InvalidRequestError if response.status_code < 500 else EngineDeadError)(message)
