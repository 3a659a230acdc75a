"""The parser of what a chat model writes. It passes on what it knows of a text while that is generated."""

from __future__ import annotations

import itertools
import re

import msgspec

from rayllm.serve.http.chat_format.calls import CallForm, Calls, Kind
from rayllm.serve.http.chat_format.families import CALL_FORMS, THINK_TAGS, ThinkTags
from rayllm.serve.http.chat_format.form import ChatFormat
from rayllm.serve.http.chat_format.harmony import Harmony
from rayllm.serve.http.chat_format.text_source import ANYTHING, SPACE, Reading, TextSource


class Piece(msgspec.Struct, frozen=True):
    """The next piece of what a model wrote.

    Of the answer's text, the reasoning before it, or the JSON text of a call's arguments; or the name of a call that
    begins. call: 0, 1, ... within the message.
    """

    kind: Kind
    text: str
    call: int = 0


class ChatParser:
    """Parses one completion."""

    def __init__(self, form: ChatFormat):
        self._form = form
        self._source = TextSource()
        self._calls = Calls(self._source, form.schemas, form.single_call, self._emit)
        self._pieces: list[Piece] = []
        self._is_cut = False
        # Whether the text that was read last is reasoning; None while that is open.
        self.in_reasoning: bool | None = None if form.thinks else False
        self._reading = self._read()
        next(self._reading)

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""
        return self._calls.count

    def feed(self, text: str, *, last: bool = False, cut: bool = False) -> list[Piece]:
        """What a piece of text brings; some is held back while it may be part of a tag or a call.

        last: no more comes. cut: because of a limit or a stop string, so that what may have become a call is left out.
        """
        if self._form.reasoning is None and self._form.tools is None:
            return [Piece("content", text)] if text else []
        self._is_cut = cut
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
        form = self._form
        if form.is_harmony:
            yield from self._read_messages()
            return
        space = yield from self._source.take_all(SPACE)
        if form.reasoning is not None:
            space = yield from self._read_reasoning(space, THINK_TAGS[form.reasoning])
        if form.tools is None:
            yield from self._read_text(space)
        else:
            yield from self._read_mixture(space, CALL_FORMS[form.tools])

    def _read_messages(self) -> Reading[None]:
        harmony = Harmony(self._calls, self._form.reasoning == "gpt_oss", self._emit)
        reading = harmony.read(lambda: self._is_cut)
        for _ in reading:
            self.in_reasoning = harmony.in_reasoning
            yield

    def _read_reasoning(self, space: str, tags: ThinkTags) -> Reading[str]:
        """Read the reasoning, if there is any.

        space: white space that the text begins with. Returns that which the answer begins with.
        """
        source, closing = self._source, tags.closing
        word = re.compile(rf"[^{re.escape(closing[0])} \t\r\n]+|{re.escape(closing[0])}")
        self.in_reasoning = (yield from source.take(tags.beginning)) or self._form.inside
        if not self.in_reasoning:
            return space
        yield from source.take_all(SPACE)
        space = ""
        while not (yield from source.take(closing)):
            if run := (yield from source.take_all(SPACE)):
                space = run
            elif run := (yield from source.take_run(word)):
                self._emit("reasoning_content", space + run)
                space = ""
            else:
                break
        self.in_reasoning = False
        yield from source.take_all(SPACE)
        return ""

    def _read_text(self, space: str) -> Reading[None]:
        """Read text without calls in it. space: what it begins with."""
        self._emit("content", space)
        while run := (yield from self._source.take_run(ANYTHING)):
            self._source.taken.clear()
            self._emit("content", run)

    def _read_mixture(self, space: str, form: CallForm) -> Reading[None]:
        """Read text with calls in it. space: what the text begins with, which is dropped if a call comes next."""
        source, calls = self._source, self._calls
        first = "".join(re.escape(opening[0]) for opening in form.openings)
        ordinary = re.compile(rf"[^{first}\n]+|.", re.DOTALL)
        at_start = True
        while not calls.is_full:
            source.taken.clear()
            source.starved = False
            if (yield from self._at_call(form, at_start)):
                count = calls.count
                yield from form.read(calls)
                if calls.count > count:
                    if source.starved and self._is_cut:
                        return
                    space = "".join(source.taken) + (yield from source.take_all(form.separators))
                    if not calls.is_full and not form.separators.fullmatch(space):
                        self._emit("content", space)
                        space = ""
                    at_start = True
                    continue
                if source.starved and calls.suspected and self._is_cut:
                    return
            else:
                if source.starved and self._is_cut:
                    yield from source.take_all(ANYTHING)  # the beginning of a tag
                    source.taken.clear()
                yield from source.take_run(ordinary)
            text = "".join(source.taken)
            if not text:
                if not calls.count:  # white space at the end belongs to the calls, if there are any
                    self._emit("content", space)
                return
            at_start = text.endswith("\n")
            self._emit("content", space + text)
            space = ""
        yield from source.take_all(ANYTHING)

    def _at_call(self, form: CallForm, at_start: bool) -> Reading[bool]:
        """Whether something comes next that may be a call."""
        for opening in form.openings:
            if (yield from self._source.at(opening)):
                return True
        if at_start:
            for char in form.bare:
                if (yield from self._source.at(char)):
                    return True
        return False


class ReasoningCounter:
    """Counts the tokens of one completion's reasoning, its tags among them, from the tokens' own texts."""

    def __init__(self, form: ChatFormat):
        self._parser = ChatParser(ChatFormat(reasoning=form.reasoning, inside=form.inside))
        self._may_go_on = form.reasoning == "gpt_oss"  # whether reasoning may come again, after it has ended
        self._open = 0  # tokens that may turn out to be of it
        self.tokens = 0

    def add(self, token_text: str) -> None:
        """Take the next token."""
        before = self._parser.in_reasoning
        if before is False and not self._may_go_on:
            return
        self._parser.feed(token_text)
        self._open += 1
        if before or self._parser.in_reasoning:
            self.tokens += self._open
        if before or self._parser.in_reasoning is not None:
            self._open = 0
