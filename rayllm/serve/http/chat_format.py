"""What a chat model writes: reasoning, text and tool calls.

    hermes   <tool_call>{"name": "f", "arguments": {...}}</tool_call>, any number, anywhere in the text (Qwen, Hermes)
    llama3   {"name": "f", "parameters": {...}} at the start of the text or of a line, or after <|python_tag|>
    json     the whole text is one such object or an array of them, as `tool_choice` "required" or a named tool enforces

Reasoning is `<think>reasoning</think>` at the start of the text. `chat_format` is what a model may write, and
`ChatParser` finds it while the text is generated, in whatever pieces that comes.

A call counts from the moment its name is that of an offered tool and its arguments begin; up to there, whatever does
not fit is text. Arguments are passed on as the model writes them, so if it breaks off or writes bad JSON in them, the
call has just that as its arguments. White space around calls and around the tags of reasoning is dropped.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, Literal, TypeVar

import msgspec

from rayllm.config.options import ServerConfig
from rayllm.serve.http.protocol import Tool
from rayllm.text.tokenizer import Tokenizer

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"

Kind = Literal["content", "reasoning_content", "call", "arguments"]  # of a piece
T = TypeVar("T")
Reading = Generator[None, None, T]  # a step of the parser: it yields when it needs more text, and returns a T

SPACE = re.compile(r"[ \t\r\n]+")  # JSON's white space
_ANYTHING = re.compile(r".+", re.DOTALL)
_WORD = re.compile(r"[^< \t\r\n]+|<")
_WITHIN_A_LINE = re.compile(r"[^<\n]+|[<\n]")
_SEPARATORS = re.compile(r"[ \t\r\n;,]+")
_SCALAR = re.compile(r"[\w.+-]+")
_OPENING = re.compile(r'["{[]')
_BETWEEN_BRACKETS = re.compile(r'[^][{}"<]+|.', re.DOTALL)
_IN_STRING = re.compile(r'[^"\\]+|["\\]')


_CALL_FORMS = {  # what stands before a call, what may stand after it, what may follow, whether bare calls count
    "hermes": (CALL_OPEN, CALL_CLOSE, SPACE, False),
    "llama3": (PYTHON_TAG, "", _SEPARATORS, True),
    "json": ("", "]", _SEPARATORS, True),
    None: ("", "", SPACE, False),
}


class ChatFormat(msgspec.Struct, frozen=True):
    """What a text is made of: all that a model writes, or what to look for in one reply."""

    tools: Literal["hermes", "llama3", "json"] | None = None  # the form of calls; None if there are none, or not known
    thinks: bool = False  # whether the text may begin with reasoning
    inside: bool = False  # whether it does in any case, because the prompt opened the tag
    tool_names: frozenset[str] = frozenset()  # the tools that may be called
    single_call: bool = False  # whether what follows the first call is left out

    @property
    def tags(self) -> set[str]:
        """The tags that must be in the text to be found."""
        call_tags = {CALL_OPEN, CALL_CLOSE} if self.tools == "hermes" else set()
        return call_tags | {THINK_OPEN, THINK_CLOSE} if self.thinks else call_tags


def chat_format(server: ServerConfig, tokenizer: Tokenizer) -> ChatFormat:
    """What a model writes: what the options say, and for "auto" what its chat template shows."""
    tools, thinks = server.tool_call_parser, server.reasoning_parser
    guessed = _guess_tools(tokenizer.chat_template_source(with_tools=True))
    return ChatFormat(
        tools=guessed if tools == "auto" else None if tools == "none" else tools,
        thinks=THINK_CLOSE in tokenizer.chat_template_source() if thinks == "auto" else thinks == "think",
    )


def _guess_tools(template: str) -> Literal["hermes", "llama3"] | None:
    if CALL_OPEN in template:
        return None if "<function=" in template else "hermes"  # some models write XML between the same tags
    if PYTHON_TAG in template or ("<|start_header_id|>" in template and '"parameters"' in template):
        return "llama3"
    return None


def calls_schema(tools: list[Tool], single: bool, arguments_key: str) -> str:
    """The JSON schema, as text, of one call (single) or of an array of at least one, each of one of `tools`.

    arguments_key: "arguments" or "parameters", whichever the model is used to.
    """
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.function.name}, arguments_key: {"$ref": f"tool_{index}"}},
            "required": ["name", arguments_key],
            "additionalProperties": False,
        }
        for index, tool in enumerate(tools)
    ]
    # With an id of its own, the references of a tool's schema go on meaning places in that schema.
    parameters = [tool.function.parameters or {"type": "object"} for tool in tools]
    definitions = {f"tool_{index}": {**schema, "$id": f"tool_{index}"} for index, schema in enumerate(parameters)}
    call: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
    schema = call if single else {"type": "array", "minItems": 1, "items": call}
    return json.dumps(schema | {"$defs": definitions}, ensure_ascii=False)


# ---- the parser


class Piece(msgspec.Struct, frozen=True):
    """The next piece of what a model wrote.

    Of the answer's text, the reasoning before it, or the JSON text of a call's arguments; or the name of a call that
    begins. call: 0, 1, ... within the message.
    """

    kind: Kind
    text: str
    call: int = 0


class TextSource:
    """Text that arrives in pieces."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._ended = False
        # What was taken since this was last cleared, for a parser that has to give it back as text.
        self.taken: list[str] = []

    def put(self, text: str, *, last: bool) -> None:
        """Add a piece. last: no more comes."""
        self._text = self._text[self._at :] + text
        self._at = 0
        self._ended = last

    def at(self, literal: str) -> Reading[bool]:
        """Whether `literal` comes next. Waits while what is there could still become it."""
        while True:
            have = self._text[self._at : self._at + len(literal)]
            if have == literal or self._ended or not literal.startswith(have):
                return have == literal
            yield

    def take(self, literal: str, *, spaced: bool = False) -> Reading[bool]:
        """Take `literal` if it comes next. spaced: after white space, which is taken in any case."""
        if spaced:
            yield from self.take_all(SPACE)
        found = yield from self.at(literal)
        if found:
            self._take(literal)
        return found

    def take_run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Take what `pattern` matches of the text at hand, to be called until it gives "": no match, or the end."""
        while self._at == len(self._text) and not self._ended:
            yield
        match = pattern.match(self._text, self._at)
        return self._take(match.group()) if match else ""

    def take_all(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Take all that `pattern` matches from here, whatever pieces it comes in."""
        runs: list[str] = []
        while run := (yield from self.take_run(pattern)):
            runs.append(run)
        return "".join(runs)

    def _take(self, text: str) -> str:
        self.taken.append(text)
        self._at += len(text)
        return text


class _Call(msgspec.Struct):
    """A call that is being read."""

    name: str | None = None
    index: int | None = None  # None until it has started
    has_arguments: bool = False
    arguments: list[str] = []  # those that came before the name


class ChatParser:
    """Parses one completion."""

    def __init__(self, form: ChatFormat):
        self._form = form
        self._source = TextSource()
        self._pieces: list[Piece] = []
        self.num_calls = 0
        self.thinking = form.thinks  # whether reasoning may still come
        self.has_reasoning = False  # whether the text began with it
        self._reading = self._read()
        next(self._reading)

    def feed(self, text: str, *, last: bool = False) -> list[Piece]:
        """What a piece of text brings; some is held back while it may be part of a tag or a call.

        last: no more comes.
        """
        if not self._form.thinks and self._form.tools is None:
            return [Piece("content", text)] if text else []
        self._source.put(text, last=last)
        next(self._reading, None)
        joined = []
        for (kind, call), group in itertools.groupby(self._pieces, key=lambda piece: (piece.kind, piece.call)):
            joined.append(Piece(kind, "".join(piece.text for piece in group), call))
        self._pieces.clear()
        return joined

    def _emit(self, kind: Kind, text: str, call: int = 0) -> None:
        if text:
            self._pieces.append(Piece(kind, text, call))

    def _read(self) -> Reading[None]:
        """All of the text."""
        source, tools = self._source, self._form.tools
        space = yield from source.take_all(SPACE)
        if self._form.thinks:
            space = yield from self._read_reasoning(space)
        if tools == "json" and (yield from source.take("[")):
            space += "[" + (yield from source.take_all(SPACE))
        yield from self._read_mixture(space, *_CALL_FORMS[tools])

    def _read_reasoning(self, space: str) -> Reading[str]:
        """Read the reasoning, if there is any.

        space: white space that the text begins with. Returns that which the answer begins with.
        """
        source = self._source
        self.has_reasoning = (yield from source.take(THINK_OPEN)) or self._form.inside
        if self.has_reasoning:
            yield from source.take_all(SPACE)
            space = ""
            while not (yield from source.take(THINK_CLOSE)):
                if run := (yield from source.take_all(SPACE)):
                    space = run
                elif word := (yield from source.take_run(_WORD)):
                    self._emit("reasoning_content", space + word)
                    space = ""
                else:
                    break
        self.thinking = False
        if self.has_reasoning:
            yield from source.take_all(SPACE)
        return "" if self.has_reasoning else space

    # ---- the forms of tool calls

    def _read_mixture(
        self, space: str, opening: str, closing: str, separators: re.Pattern[str], bare: bool
    ) -> Reading[None]:
        """Read text with calls in it. space: what the text begins with, which is dropped if a call comes next.

        opening: what stands before a call, or "". closing: what may stand after it, or "". separators: what may follow.
        bare: whether a call at the start of the text, of a line, or right after another one needs no opening.
        """
        source = self._source
        at_start = True
        while True:
            source.taken.clear()
            opened = opening != "" and (yield from source.take(opening))
            if opened or (bare and at_start and (yield from source.at("{"))):
                if (yield from self._read_call()):
                    if self._form.single_call:
                        yield from source.take_all(_ANYTHING)
                        return
                    space = yield from source.take_all(separators)
                    if closing and (yield from source.take(closing)):
                        space = yield from source.take_all(separators)
                    at_start = True
                    continue
            elif not (yield from source.take_run(_WITHIN_A_LINE)):
                if not self.num_calls:  # white space at the end belongs to the calls, if there are any
                    self._emit("content", space)
                return
            text = "".join(source.taken)
            at_start = text.endswith("\n")
            self._emit("content", space + text)
            space = ""

    # ---- one call

    def _read_call(self) -> Reading[bool]:
        """Read an object {"name": ..., "arguments" or "parameters": ...}, keys in any order, others skipped.

        False, with nothing emitted, if it is no call, or breaks off before it is known as one.
        """
        source, call = self._source, _Call()
        if not (yield from source.take("{", spaced=True)):
            return False
        while not (yield from source.take("}", spaced=True)):
            key = yield from self._string()
            if key is None or not (yield from source.take(":", spaced=True)):
                break
            yield from source.take_all(SPACE)
            if not (yield from self._member(call, key)):
                break
            if not (yield from source.take(",", spaced=True)) and not (yield from source.at("}")):
                break
        else:
            if call.name is not None and not call.has_arguments:
                self._add_arguments(call, "{}")  # a tool without parameters, called without arguments
        return call.index is not None

    def _member(self, call: _Call, key: str) -> Reading[bool]:
        """Read one value; False if it broke off or cannot be part of a call."""
        if key == "name" and call.name is None:
            call.name = yield from self._string()
            is_offered = call.name in self._form.tool_names
            if is_offered and call.has_arguments:
                self._add_arguments(call, "")
            return is_offered
        if key not in ("arguments", "parameters") or call.has_arguments:
            return (yield from self._value(lambda _: None))
        call.has_arguments = True
        if (yield from self._source.at("{")):
            return (yield from self._value(partial(self._add_arguments, call)))
        # Some models write the object's JSON into a string.
        text = "{}" if (yield from self._source.take("null")) else (yield from self._string())
        if text is None or not _is_object(text):
            return False
        self._add_arguments(call, text)
        return True

    def _add_arguments(self, call: _Call, text: str) -> None:
        """Pass arguments on, or keep them until the name is known."""
        call.arguments.append(text)
        if call.name is None:
            return
        if call.index is None:
            call.index, self.num_calls = self.num_calls, self.num_calls + 1
            self._emit("call", call.name, call.index)
        self._emit("arguments", "".join(call.arguments), call.index)
        call.arguments.clear()

    # ---- JSON

    def _string(self) -> Reading[str | None]:
        """Read a string; its value. None if there is none, or it breaks off."""
        pieces: list[str] = []
        if not (yield from self._source.at('"')) or not (yield from self._value(pieces.append)):
            return None
        try:
            return json.loads("".join(pieces), strict=False)
        except ValueError:
            return None

    def _value(self, emit: Callable[[str], object]) -> Reading[bool]:
        """Read a value of any kind as it is written; False if it breaks off or there is none.

        The tag that closes a call ends it even where brackets are open, but not inside strings.
        """
        source, depth, quoted, escaped = self._source, 0, False, False
        close = self._form.tools == "hermes"
        if scalar := (yield from source.take_all(_SCALAR)):
            emit(scalar)
            return True
        run = yield from source.take_run(_OPENING)
        while run:
            emit(run)
            if escaped:
                escaped = False
            elif run == '"':
                quoted = not quoted
            elif quoted:
                escaped = run == "\\"
            else:
                depth += (run in ("{", "[")) - (run in ("}", "]"))
            if depth == 0 and not quoted:
                return True
            if close and not quoted and (yield from source.at(CALL_CLOSE)):
                return False
            run = yield from source.take_run(_IN_STRING if quoted else _BETWEEN_BRACKETS)
        return False


class ReasoningCounter:
    """Counts the tokens of one completion up to and with the closing tag, from the tokens' own texts."""

    def __init__(self, form: ChatFormat):
        self._parser = ChatParser(ChatFormat(thinks=True, inside=form.inside))
        self.tokens = 0

    def add(self, token_text: str) -> None:
        """Take the next token."""
        if self._parser.thinking:
            self._parser.feed(token_text)
            still = self._parser.thinking or self._parser.has_reasoning
            self.tokens = self.tokens + 1 if still else 0


def _is_object(text: str) -> bool:
    """Whether this is a JSON object that can be sent: text with lone surrogates cannot."""
    try:
        text.encode()
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
