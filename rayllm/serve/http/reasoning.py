"""Models that think before they answer: `<think>reasoning</think>answer`, split while it is generated.

Only what the text begins with is reasoning; tags further down are text. White space around the tags belongs to them.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from rayllm.serve.http.text_source import ANYTHING, SPACE, Reading, TextSource

OPEN, CLOSE = "<think>", "</think>"
_PLAIN = re.compile(r"[^< \t\r\n]+")


class Split(NamedTuple):
    """New text of both kinds."""

    reasoning: str
    content: str


class ReasoningSplitter:
    """Splits the text of one completion. inside: the prompt already opened the tag."""

    def __init__(self, inside: bool):
        self._source = TextSource()
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._inside = inside
        self.absent = False  # True when the text turned out to have no reasoning
        self.over = False  # True when the closing tag was read, or there is no reasoning
        self._reading = self._read()
        next(self._reading)

    def feed(self, text: str) -> Split:
        """What a piece of text brings; some is held back while it may be part of a tag."""
        if text:
            self._source.put(text)
            next(self._reading, None)
        return self._taken()

    def finish(self) -> Split:
        """What was held back, at the end of the text."""
        self._source.end()
        next(self._reading, None)
        return self._taken()

    def _taken(self) -> Split:
        split = Split("".join(self._reasoning), "".join(self._content))
        self._reasoning.clear()
        self._content.clear()
        self._source.taken.clear()
        return split

    def _read(self) -> Reading[None]:
        source = self._source
        space = yield from source.take_all(SPACE)
        opened = yield from source.take(OPEN)
        if opened or self._inside:
            yield from self._read_reasoning()
            self.over = True
            yield from source.take_all(SPACE)
        else:
            self.absent = self.over = True
            self._content.append(space)
        while run := (yield from source.take_run(ANYTHING)):
            self._content.append(run)

    def _read_reasoning(self) -> Reading[None]:
        source = self._source
        yield from source.take_all(SPACE)
        while not (yield from source.take(CLOSE)):
            space = yield from source.take_all(SPACE)
            if space and (yield from source.take(CLOSE)):
                return
            run = (yield from source.take_run(_PLAIN)) or (yield from source.take_char())
            if not run:
                return  # the end; white space before it is no more of use than before the tag
            self._reasoning += (space, run)


class ReasoningCounter:
    """Counts the tokens of one completion up to and with the closing tag, from the tokens' own texts."""

    def __init__(self, inside: bool):
        self._splitter = ReasoningSplitter(inside)
        self.tokens = 0

    def add(self, token_text: str) -> None:
        """Take the next token."""
        if self._splitter.over:
            return
        self._splitter.feed(token_text)
        self.tokens = 0 if self._splitter.absent else self.tokens + 1
