"""Requests of every kind over HTTP, streamed or whole, brought to one form of answer that can be compared to the bit.

A client tries again when its connection breaks off, as clients do. Each request has an `Idempotency-Key`, the same in
all tries. What came before a break has to be a beginning of the answer in the end.
"""

from __future__ import annotations

import asyncio
import shutil
import time
import uuid
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import orjson
from http_load import NO_LIMITS

from rayllm.config.options import BUNDLED_MODEL

RETRY_S = 0.5
TRY_AGAIN = (429, 503)
TEXT = "The for statement is used to iterate over the elements of a sequence"
# The bundled model's own has no place for tools.
TEMPLATE = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- if loop.last and tools %} {{ tools | tojson }}{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
Json = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """late: for the moment when all others run, because it is over soon once its prompt is computed. repeats: its
    answer is the same each time."""

    kind: str
    path: str
    body: Json
    late: bool = False
    repeats: bool = True

    @property
    def stream(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def is_even(self) -> bool:
        """Whether the client sees something of each token soon, so that gaps between events say something."""
        return self.stream and self.path == "/v1/completions" and "structured_outputs" not in self.body

    def salted(self, salt: str) -> Request:
        """With prompts that no cache has; nothing else of the answer depends on it."""
        return replace(self, body=self.body | {"cache_salt": salt})


@dataclass
class Choice:
    """What has come of one choice, streamed or not."""

    text: str = ""
    calls: list[list[str]] = field(default_factory=list)  # name and arguments of each tool call
    tokens: list[Any] = field(default_factory=list)  # token, log-probability, the likeliest ones, offset
    finish_reason: str | None = None

    def is_beginning_of(self, whole: Choice) -> bool:
        """Whether all of this is there in `whole`, and in the same place."""
        texts = [(self.text, whole.text)]
        if len(self.calls) > len(whole.calls):
            return False
        for own, other in zip(self.calls, whole.calls, strict=False):
            texts += [(own[0], other[0]), (own[1], other[1])]
        return (
            all(other.startswith(own) for own, other in texts)
            and self.tokens == whole.tokens[: len(self.tokens)]
            and self.finish_reason in (None, whole.finish_reason)
        )


@dataclass
class Answer:
    """A request's answer so far, or whole."""

    choices: dict[int, Choice] = field(default_factory=dict)
    usage: tuple[int, int] | None = None  # tokens of the prompt, and of the completions
    other: list[Any] = field(default_factory=list)  # log-probabilities of the prompt, embeddings

    def add(self, payload: Json) -> bool:
        """Take an event of a stream, or a whole answer; returns whether there was something of a choice in it.

        Raises ValueError if it contradicts what came before.
        """
        usage, found = payload.get("usage"), False
        if usage is not None:
            self.usage = usage["prompt_tokens"], usage.get("completion_tokens", 0)
        for each in payload.get("choices", ()):
            choice = self.choices.setdefault(each["index"], Choice())
            if choice.finish_reason is not None:
                raise ValueError(f"choice {each['index']} goes on after its end")
            _add(choice, each)
            found = True
            self.other += [each["prompt_logprobs"]] if "prompt_logprobs" in each else []
        self.other += [each["embedding"] for each in payload.get("data", ())]
        return found

    def is_beginning_of(self, whole: Answer) -> bool:
        return all(
            index in whole.choices and choice.is_beginning_of(whole.choices[index])
            for index, choice in self.choices.items()
        )


def _add(choice: Choice, new: Json) -> None:
    """Add what came of a choice."""
    part: Json = new.get("delta") or new.get("message") or {"content": new.get("text")}
    choice.text += part.get("content") or ""
    for position, call in enumerate(part.get("tool_calls") or ()):
        index, function = call.get("index", position), call["function"]
        if index == len(choice.calls):
            choice.calls.append(["", ""])
        choice.calls[index][0] += function.get("name") or ""
        choice.calls[index][1] += function.get("arguments") or ""
    logprobs = new.get("logprobs") or {}
    tokens = list(logprobs.get("content") or ())
    if "tokens" in logprobs:
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        tokens = [list(token) for token in zip(*(logprobs[name] for name in names), strict=True)]
    choice.tokens += tokens
    choice.finish_reason = new.get("finish_reason")


@dataclass
class Result:
    """A request as its client saw it; times are those of time.monotonic()."""

    answer: Answer = field(default_factory=Answer)
    failure: str | None = None  # for good
    breaks: list[Answer] = field(default_factory=list)  # what had come whenever a connection broke off
    broke: list[float] = field(default_factory=list)  # when that was
    first: float | None = None  # when something came of every choice
    last: float = 0.0
    gap: float = 0.0  # longest between two events, seconds


class _BrokenError(Exception):
    """The connection ended before the answer did."""


class _RefusedError(Exception):
    """The answer says to try again."""


async def ask(client: httpx.AsyncClient, url: str, request: Request, result: Result, retry: bool = True) -> Result:
    """Send a request until it is answered, or refused for good; fills in and returns the result.

    retry: whether to try again after a connection that broke off.
    """
    headers = {"content-type": "application/json", "idempotency-key": uuid.uuid4().hex}
    content = orjson.dumps(request.body)
    while True:
        result.answer, result.first = Answer(), None
        try:
            if request.stream:
                await _read_stream(client, url + request.path, content, headers, request, result)
            else:
                await _read_whole(client, url + request.path, content, headers, result)
            break
        except (httpx.TransportError, _BrokenError):
            result.breaks.append(result.answer)
            result.broke.append(time.monotonic())
            if not retry:
                break
        except _RefusedError as error:
            if not result.breaks:  # it was the first try
                result.failure = str(error)
                break
        except ValueError as error:
            result.failure = f"{type(error).__name__}: {error}"
            break
        await asyncio.sleep(RETRY_S)
    return result


def _check_status(status: int, text: bytes) -> None:
    if status in TRY_AGAIN:
        raise _RefusedError(f"status {status}: {text[:300].decode(errors='replace')}")
    if status != 200:
        raise ValueError(f"status {status}: {text[:300].decode(errors='replace')}")


async def _read_whole(
    client: httpx.AsyncClient, url: str, content: bytes, headers: dict[str, str], result: Result
) -> None:
    response = await client.post(url, content=content, headers=headers)
    _check_status(response.status_code, response.content)
    result.answer.add(orjson.loads(response.content))


async def _read_stream(
    client: httpx.AsyncClient, url: str, content: bytes, headers: dict[str, str], request: Request, result: Result
) -> None:
    wanted, done = request.body.get("n", 1), False
    async with client.stream("POST", url, content=content, headers=headers) as response:
        if response.status_code != 200:
            _check_status(response.status_code, await response.aread())
        async for line in response.aiter_lines():
            now = time.monotonic()
            if done and line:
                raise ValueError("the stream goes on after its end")
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                event = orjson.loads(line[6:])
                if "error" in event:
                    raise ValueError(f"error in the stream: {event['error']['message']}")
                if not result.answer.add(event):
                    continue
                if result.first is not None:
                    result.gap = max(result.gap, now - result.last)
                elif len(result.answer.choices) == wanted:
                    result.first = now
                result.last = now
    if not done:
        raise _BrokenError


def new_client() -> httpx.AsyncClient:
    """One whose requests may take as long as their caller lets them."""
    return httpx.AsyncClient(timeout=None, limits=NO_LIMITS)


def model_with_tools(folder: Path) -> Path:
    """The bundled model with a chat template that has a place for tools, as a copy in `folder`."""
    copy = shutil.copytree(BUNDLED_MODEL, folder / Path(BUNDLED_MODEL).name)
    (copy / "chat_template.jinja").write_text(TEMPLATE)
    return copy


async def make_requests(url: str, tokens: int) -> list[Request]:
    """Requests of every kind, most of them of `tokens` tokens, for the server's only model, which has a chat template.

    Stop strings are chosen so that they end what the model says to their prompt at three quarters of its length.
    """
    greedy: Json = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True}
    noisy: Json = greedy | {"temperature": 1.1, "top_p": 0.95}
    penalties: Json = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2}
    text: Json = {"type": "string", "minLength": 2 * tokens, "maxLength": 3 * tokens}
    schema = {"type": "object", "properties": {"a": text}, "required": ["a"]}
    enough: Json = {"max_tokens": 8 * tokens, "temperature": 0.5}  # for a grammar to come to its end
    function = {"name": "travel", "parameters": {"type": "object", "properties": {"plan": text}, "required": ["plan"]}}
    chat: Json = {"messages": [{"role": "user", "content": TEXT}]}
    called = enough | chat | {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    long = TEXT * 40
    stop = Request("", "/v1/completions", {"prompt": f"{TEXT} until"} | noisy | {"seed": 99})
    async with new_client() as client:
        said = (await ask(client, url, stop, Result())).answer.choices[0].text
    place = len(said) * 3 // 4
    while said.find(said[place : place + 12]) < place:
        place += 1
    stopped = stop.body | {"stop": [said[place : place + 12], "never said"], "max_tokens": 2 * tokens}

    requests: list[Request] = []

    def add(kind: str, body: Json, path: str = "/v1/completions", stream: bool = True, **fields: bool) -> None:
        number = len(requests)
        body = {"seed": number} | ({"prompt": f"{TEXT} {number}"} if path == "/v1/completions" else {}) | body
        body |= {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        requests.append(Request(kind if stream else f"{kind}, whole", path, body, **fields))

    add("decode with noise", noisy | {"priority": -1})
    add("n = 4", noisy | {"n": 4})
    add("logprobs", noisy | {"logprobs": 3})
    add("penalties", noisy | penalties)
    add("stop strings", stopped)
    add("chat", noisy | chat | {"logprobs": True, "top_logprobs": 2}, "/v1/chat/completions")
    add("min_tokens", noisy | {"ignore_eos": False, "min_tokens": tokens - 2})
    add("no seed", noisy | {"seed": None, "logprobs": 0}, repeats=False)
    for stream in (True, False):
        add("decode", greedy, stream=stream)
        add("grammar", enough | {"structured_outputs": {"json": schema}}, stream=stream)
        add("tools", called, "/v1/chat/completions", stream=stream)
        add("prompt", {"prompt": f"{stream} {long}", "max_tokens": 4, "temperature": 0}, stream=stream, late=True)
    add("best_of", noisy | {"best_of": 2}, stream=False)
    add("beams", greedy | {"use_beam_search": True, "best_of": 2, "n": 2}, stream=False)
    add("prompt logprobs", {"prompt": f"Whole {long}", "max_tokens": 2, "prompt_logprobs": 1}, stream=False, late=True)
    embedded = Request("embeddings", "/v1/embeddings", {"input": [long, TEXT + long], "pooling": "mean"}, late=True)
    return [*requests, embedded]


def difference(request: Request, result: Result, expected: Answer, is_answered: bool = True) -> str | None:
    """What is wrong with what a client got; None if nothing is. Without a seed only lengths and ends can be compared.

    is_answered: whether there has to be an answer, rather than only the beginning of one.
    """
    got = result.answer
    for part in result.breaks:
        # Also without a seed: the next try has the same `Idempotency-Key`, and so gets the stream that there was.
        if (request.repeats and not part.is_beginning_of(expected)) or (is_answered and not part.is_beginning_of(got)):
            return "what had come before the connection broke off is contradicted"
    if not is_answered:
        return None
    if not request.repeats:
        got, expected = _outline(got), _outline(expected)
    if got == expected:
        return None
    for name in ("usage", "choices", "other"):
        one, other = getattr(got, name), getattr(expected, name)
        if one != other:
            return f"{name}: {str(one)[:300]} instead of {str(other)[:300]}"
    raise AssertionError("unreachable")


def _outline(answer: Answer) -> Answer:
    """How long the choices are, and how they end."""
    choices = {index: replace(choice, text="", tokens=[len(choice.tokens)]) for index, choice in answer.choices.items()}
    return Answer(choices, answer.usage)
