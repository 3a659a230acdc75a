"""`rayllm chat`: a conversation with a running server in the terminal."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx

from rayllm.cli.api_client import api_base, auth_headers, check_response, first_model
from rayllm.cli.input_lines import input_lines
from rayllm.errors import EngineDeadError, InvalidRequestError

HELP = """\
/system [TEXT]       the system message, or a new one
/params [NAME=VALUE] what is sent with each message; NAME= takes it back to the server's default
/reset               forget the conversation, not the system message
/save FILE           write the conversation as JSON; /load FILE reads it back
/exit                leave; so do an empty line and Ctrl-D. Ctrl-C stops an answer"""

_TIMEOUT = httpx.Timeout(10, read=600)
# Names that /params takes; the server says which values are possible.
_PARAMS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_tokens",
    "seed",
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
# Control characters of an answer, which a terminal would obey. Line feeds and tabs stay.
_HARMLESS = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if code not in (9, 10)}
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class Chat:
    """Keeps the conversation; each answer is streamed to standard output as it comes.

    url: of the server, with or without /v1. model: None takes the first that the server lists.
    """

    def __init__(
        self,
        url: str,
        model: str | None,
        system: str | None,
        max_tokens: int | None,
        temperature: float,
        api_key: str | None = None,
    ):
        self._base = api_base(url)
        self._headers = auth_headers(api_key)
        self._model = model
        self._system = system
        self._params: dict[str, Any] = {"temperature": temperature}
        if max_tokens is not None:
            self._params["max_tokens"] = max_tokens
        self._turns: list[dict[str, str]] = []  # what was said after the system message
        self._commands = {
            "/help": self._help,
            "/system": self._set_system,
            "/params": self._set_params,
            "/reset": self._reset,
            "/save": self._save,
            "/load": self._load,
        }

    def run(self) -> None:
        """Read lines until the end. Raises EngineDeadError if the server does not answer or breaks off."""
        try:
            with httpx.Client(timeout=_TIMEOUT, headers=self._headers) as client:
                self._run(client)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise EngineDeadError(f"no answer from {self._base}: {error or type(error).__name__}") from None

    def _run(self, client: httpx.Client) -> None:
        if self._model is None:
            self._model = first_model(client.get(f"{self._base}/models"))
        _note(f"{self._model} at {self._base}; /help lists commands, an empty line leaves")
        for line in input_lines():
            if line in ("/exit", "/quit"):
                return
            try:
                if line.startswith("/"):
                    self._command(line)
                else:
                    self._ask(client, line)
            except InvalidRequestError as error:
                _note(f"error: {error}")
            except (EngineDeadError, httpx.HTTPError) as error:
                if not sys.stdin.isatty():
                    raise  # a script is told by the exit code; someone who types may try again
                _note(f"error: {error or type(error).__name__}")

    def _command(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        if name not in self._commands:
            raise InvalidRequestError(f"unknown command {name}; /help lists them")
        self._commands[name](argument.strip())

    def _ask(self, client: httpx.Client, line: str) -> None:
        """One question and its answer; it is as if it had not been asked if there is no answer."""
        question = {"role": "user", "content": line}
        answer = Answer()
        body = {
            "model": self._model,
            "messages": [*self._messages(), question],
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            **self._params,
        }
        try:
            with client.stream("POST", f"{self._base}/chat/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                    check_response(response)
                for event in _events(response):
                    answer.take(event)
        except KeyboardInterrupt:
            answer.stopped = True  # leaving `stream` closed the connection, which ends the request in the server
        finally:
            answer.end()
        if answer.text:
            self._turns += [question, {"role": "assistant", "content": answer.text}]

    def _messages(self) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self._system}] if self._system else []
        return system + self._turns

    def _help(self, _: str) -> None:
        _note(HELP)

    def _set_system(self, text: str) -> None:
        self._system = text or self._system
        _note(f"system: {self._system or 'none'}")

    def _set_params(self, text: str) -> None:
        if text:
            name, _, value = text.partition("=")
            name = name.strip()
            if name not in _PARAMS or "=" not in text:
                raise InvalidRequestError(f"/params takes NAME=VALUE with one of {', '.join(_PARAMS)}, not {text!r}")
            if value.strip():
                self._params[name] = _parameter(name, value.strip())
            else:
                self._params.pop(name, None)
        _note("  ".join(f"{name}={json.dumps(value)}" for name, value in self._params.items()) or "server's defaults")

    def _reset(self, _: str) -> None:
        self._turns = []

    def _save(self, path: str) -> None:
        saved = {"model": self._model, "params": self._params, "messages": self._messages()}
        try:
            with open(path, "w", encoding="utf-8") as file:
                json.dump(saved, file, ensure_ascii=False, indent=1)
        except OSError as error:
            raise InvalidRequestError(f"/save FILE: {path!r} cannot be written: {error.strerror}") from None
        _note(f"saved {len(self._turns)} messages")

    def _load(self, path: str) -> None:
        """The messages of a file of /save; model and params stay as they are."""
        try:
            with open(path, encoding="utf-8") as file:
                messages = json.load(file)["messages"]
            turns = [{"role": str(turn["role"]), "content": str(turn["content"])} for turn in messages]
        except OSError as error:
            raise InvalidRequestError(f"/load FILE: {path!r} cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError):
            raise InvalidRequestError(f"/load FILE: {path!r} is not a conversation saved by /save") from None
        has_system = bool(turns) and turns[0]["role"] == "system"
        self._system = turns[0]["content"] if has_system else None
        self._turns = turns[has_system:]
        _note(f"loaded {len(self._turns)} messages")


class Answer:
    """Prints one answer as it comes, reasoning dimmed, and what it cost at its end."""

    def __init__(self) -> None:
        self.text = ""
        self.stopped = False
        self._reasoning = False  # the last thing printed was reasoning
        self._usage: dict[str, Any] | None = None
        self._finish: str | None = None
        self._start = time.perf_counter()
        self._first = self._last = 0.0
        self._colours = sys.stdout.isatty()  # and so control characters mean something

    def take(self, event: dict[str, Any]) -> None:
        """Raises EngineDeadError for an error in the stream."""
        if "error" in event:
            raise EngineDeadError(event["error"]["message"])
        self._usage = event.get("usage") or self._usage
        for choice in event["choices"]:
            self._finish = choice.get("finish_reason") or self._finish
            self._print(choice["delta"].get("reasoning_content") or "", reasoning=True)
            self._print(choice["delta"].get("content") or "", reasoning=False)

    def _print(self, text: str, *, reasoning: bool) -> None:
        if not text:
            return
        self._last = time.perf_counter()
        self._first = self._first or self._last
        if reasoning != self._reasoning:
            self._reasoning = reasoning
            sys.stdout.write(
                ("\n" if not reasoning else "") + ((_DIM if reasoning else _PLAIN) if self._colours else "")
            )
        if not reasoning:
            self.text += text
        print(text.translate(_HARMLESS) if self._colours else text, end="", flush=True)

    def end(self) -> None:
        """Finish the line; say what is known of tokens and times."""
        if self._first:
            print(_PLAIN if self._colours else "")
        if self._usage is None:
            return
        tokens_in, tokens_out = self._usage["prompt_tokens"], self._usage["completion_tokens"]
        parts = [f"{tokens_in} tokens in, {tokens_out} out"]
        if cached := (self._usage.get("prompt_tokens_details") or {}).get("cached_tokens"):
            parts[0] = f"{tokens_in} tokens in ({cached} cached), {tokens_out} out"
        if self._first:
            parts.append(f"first after {(self._first - self._start) * 1000:.0f} ms")
        if tokens_out > 1 and self._last > self._first:
            parts.append(f"{(tokens_out - 1) / (self._last - self._first):.1f} tokens/s")
        if self.stopped:
            parts.append("stopped")
        elif self._finish not in (None, "stop"):
            parts.append(f"ended by {self._finish}")
        _note(f"[{'; '.join(parts)}]", dim=True)


def _parameter(name: str, text: str) -> Any:
    """The value of /params NAME=text: a number or, of stop, a text. Raises InvalidRequestError for anything else."""
    if name == "stop":
        return text
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            if math.isfinite(value := kind(text)):
                return value
    raise InvalidRequestError(f"{name} must be a number, not {text!r}")


def _note(text: str, *, dim: bool = False) -> None:
    """To standard error, so that standard output has nothing but answers."""
    print(f"{_DIM}{text}{_PLAIN}" if dim and sys.stderr.isatty() else text, file=sys.stderr)


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """Raises EngineDeadError if the stream ends before its end mark."""
    for line in response.iter_lines():
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            yield json.loads(line[6:])
    raise EngineDeadError("the answer broke off")
