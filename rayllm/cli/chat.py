"""`rayllm chat`: a conversation with a running server in the terminal."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from rayllm.cli.options import LOCAL_SERVER, ApiKey, ServedModel, ServerUrl
from rayllm.errors import EngineDeadError, InvalidRequestError

HELP = """\
/system [TEXT]       the system message, or a new one
/params [NAME=VALUE] fields that each request has, as JSON or text; NAME= takes one back to the server's default
/reset               forget the conversation, not the system message
/save FILE           write the conversation as JSON; /load FILE reads it back
/exit                leave; so do an empty line and Ctrl-D. Ctrl-C stops an answer"""

HISTORY_LENGTH = 1000
CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 10.0, 600.0
_OWN_FIELDS = {"model", "messages", "stream", "stream_options", "n"}  # that /params cannot change
# Control characters of an answer, which a terminal would obey. Line feeds and tabs stay.
_HARMLESS = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if code not in (9, 10)}


def chat(
    url: ServerUrl = LOCAL_SERVER,
    model: ServedModel = None,
    api_key: ApiKey = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens of an answer at most.")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 always takes the most likely token; the model's default if absent.")
    ] = None,
) -> None:
    """Talk to a running server. /help lists what else there is; an empty line or /exit leaves."""
    given = {"temperature": temperature, "max_tokens": max_tokens}
    params = {name: value for name, value in given.items() if value is not None}
    conversation = Chat(connect(url, api_key), model, params)
    if system:
        conversation.set_system(system)
    conversation.run(input_lines())


def connect(url: str, api_key: str | None) -> Any:
    """An `openai.OpenAI` for a server. url: with or without /v1."""
    from openai import OpenAI, Timeout

    return OpenAI(
        base_url=url.rstrip("/").removesuffix("/v1") + "/v1",
        api_key=api_key or "none",  # without one, the client would send the key of OpenAI's own service
        timeout=Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
        max_retries=0,
    )


@contextlib.contextmanager
def client_errors(url: str) -> Iterator[None]:
    """Turn errors of the openai client into InvalidRequestError where the server refused, else EngineDeadError."""
    import openai

    try:
        yield
    except openai.APIStatusError as error:
        kind = InvalidRequestError if error.status_code < 500 else EngineDeadError
        message = error.body.get("message") if isinstance(error.body, dict) else None
        raise kind(message or f"the server answered with status {error.status_code}") from None
    except openai.APIConnectionError as error:
        raise EngineDeadError(f"no answer from {url}: {error.__cause__ or error}") from None
    except openai.APIError as error:  # within a stream
        raise EngineDeadError(error.message) from None


class Chat:
    """A conversation; each answer is streamed to standard output as it comes."""

    def __init__(self, client: Any, model: str | None, params: dict[str, Any]):
        """client: from `connect`. model: None takes the first that the server lists. params: fields of each request.

        Raises InvalidRequestError or EngineDeadError if the server is asked for its models and has no good answer.
        """
        self._client = client
        self._url = str(client.base_url).rstrip("/")
        self._params = params
        self._messages: list[dict[str, str]] = []  # of the request's form, the system message first if there is one
        with client_errors(self._url):
            self._model = model or next((str(each.id) for each in client.models.list()), None)
        if self._model is None:
            raise EngineDeadError(f"{self._url} lists no models")

    def run(self, lines: Iterable[str]) -> None:
        """Answer the lines. In a script, raises EngineDeadError if the server does not answer or breaks off."""
        _note(f"{self._model} at {self._url}; /help lists commands, an empty line leaves")
        for line in lines:
            if line in ("/exit", "/quit"):
                return
            try:
                if line.startswith("/"):
                    self._command(line)
                else:
                    self._ask(line)
            except (InvalidRequestError, EngineDeadError, OSError) as error:
                if isinstance(error, EngineDeadError) and not sys.stdin.isatty():
                    raise  # a script is told by the exit code; someone who types may try again
                _note(f"error: {error}")

    def _command(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        match name:
            case "/help":
                _note(HELP)
            case "/system":
                if argument.strip():
                    self.set_system(argument.strip())
                _note(f"system: {self._messages[0]['content'] if self._system() else 'none'}")
            case "/params":
                self._set_params(argument.strip())
            case "/reset":
                self._messages = self._system()
            case "/save":
                saved = {"model": self._model, "params": self._params, "messages": self._messages}
                Path(argument.strip()).write_text(json.dumps(saved, ensure_ascii=False, indent=1), encoding="utf-8")
                _note(f"saved {len(self._messages)} messages")
            case "/load":
                self._load(argument.strip())
            case _:
                raise InvalidRequestError(f"unknown command {name}; /help lists them")

    def _system(self) -> list[dict[str, str]]:
        return [message for message in self._messages[:1] if message["role"] == "system"]

    def set_system(self, text: str) -> None:
        """Put a system message in the place of the one that the conversation has, if any."""
        self._messages[: len(self._system())] = [{"role": "system", "content": text}]

    def _set_params(self, text: str) -> None:
        if text:
            name, separator, value = (part.strip() for part in text.partition("="))
            if not separator or name in _OWN_FIELDS:
                raise InvalidRequestError(f"/params takes NAME=VALUE with a field of a chat request, not {text!r}")
            self._params.pop(name, None)
            if value:
                self._params[name] = value
            with contextlib.suppress(ValueError):  # NaN and infinities, which JSON does not have, stay text
                self._params[name] = json.loads(value, parse_constant=str)
        _note("  ".join(f"{name}={json.dumps(value)}" for name, value in self._params.items()) or "server's defaults")

    def _load(self, path: str) -> None:
        """Take the messages of a file of /save; model and params stay as they are."""
        try:
            messages = json.loads(Path(path).read_text(encoding="utf-8"))["messages"]
            self._messages = [{"role": str(each["role"]), "content": str(each["content"])} for each in messages]
        except (ValueError, KeyError, TypeError):
            raise InvalidRequestError(f"/load FILE: {path!r} is not a conversation saved by /save") from None
        _note(f"loaded {len(self._messages)} messages")

    def _ask(self, line: str) -> None:
        """One question and its answer; it is as if it had not been asked if there is no answer."""
        question = {"role": "user", "content": line}
        answer = Answer()
        try:
            with client_errors(self._url):
                stream = self._client.chat.completions.create(
                    model=self._model,
                    messages=[*self._messages, question],
                    stream=True,
                    stream_options={"include_usage": True, "continuous_usage_stats": True},
                    extra_body=self._params,
                )
                with stream:  # leaving it closes the connection, which ends the request in the server
                    for chunk in stream:
                        answer.add(chunk)
            if answer.ending is None:
                raise EngineDeadError("the answer broke off")
        except KeyboardInterrupt:
            answer.ending = "Ctrl-C"
        finally:
            answer.end()
        if answer.text:
            self._messages += [question, {"role": "assistant", "content": answer.text}]


class Answer:
    """Prints one answer as it comes, reasoning dimmed, and what it cost at its end."""

    def __init__(self) -> None:
        self.text = ""
        self.ending: str | None = None  # the finish reason, or what stopped the answer; None while it goes on
        self._reasoning = False  # whether the last piece was reasoning
        self._usage: Any = None
        self._start = time.perf_counter()
        self._first = self._last = 0.0  # when the first and the last piece came

    def add(self, chunk: Any) -> None:
        """chunk: an `openai.types.chat.ChatCompletionChunk`."""
        self._usage = chunk.usage or self._usage
        for choice in chunk.choices:
            self.ending = choice.finish_reason or self.ending
            self.text += choice.delta.content or ""
            self._print(getattr(choice.delta, "reasoning_content", None), reasoning=True)
            self._print(choice.delta.content, reasoning=False)

    def _print(self, text: str | None, *, reasoning: bool) -> None:
        if not text:
            return
        self._last = time.perf_counter()
        self._first = self._first or self._last
        if sys.stdout.isatty():
            text = text.translate(_HARMLESS)
        if self._reasoning and not reasoning:
            print()
        self._reasoning = reasoning
        if reasoning:
            typer.secho(text, nl=False, dim=True)  # in a pipe, not dimmed
        else:
            print(text, end="", flush=True)

    def end(self) -> None:
        """Finish the line; say what is known of tokens and times."""
        if self._first:
            print()
        if self._usage is None:
            return
        details, made = self._usage.prompt_tokens_details, self._usage.completion_tokens
        cached = f" ({details.cached_tokens} cached)" if details and details.cached_tokens else ""
        parts = [f"{self._usage.prompt_tokens} tokens in{cached}, {made} out"]
        if self._first:
            parts.append(f"first after {(self._first - self._start) * 1000:.0f} ms")
        if made > 1 and self._last > self._first:
            parts.append(f"{(made - 1) / (self._last - self._first):.1f} tokens/s")
        if self.ending not in (None, "stop"):
            parts.append(f"ended by {self.ending}")
        typer.secho(f"[{'; '.join(parts)}]", err=True, dim=True)


def input_lines() -> Iterator[str]:
    """What the user types, up to an empty line or the end of input. Lines of a pipe or file come as they are.

    Raises InvalidRequestError if they are not text.
    """
    if not sys.stdin.isatty():
        try:
            yield from itertools.takewhile(bool, map(str.strip, sys.stdin))
        except UnicodeDecodeError as error:
            raise InvalidRequestError(f"standard input is not UTF-8 text: {error.reason}") from None
        return
    import readline  # gives `input` line editing

    folder = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    path = Path(folder) / "rayllm" / "chat_history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        readline.read_history_file(path)
    except OSError as error:
        _note(f"the history cannot be kept in {path}: {error.strerror}")
    readline.set_history_length(HISTORY_LENGTH)
    while line := _typed_line():
        with contextlib.suppress(OSError):  # said above
            readline.write_history_file(path)
        yield line


def _typed_line() -> str:
    """The next line; empty at the end. Ctrl-C drops what is typed so far, and twice in a row it is the end."""
    for _ in range(2):
        try:
            return input("> ").strip()
        except EOFError:
            break
        except KeyboardInterrupt:
            _note("\nCtrl-C twice, Ctrl-D or an empty line leaves")
    return ""


def _note(text: str) -> None:
    """To standard error, so that standard output has nothing but answers."""
    print(text, file=sys.stderr)
