"""Text that arrives in pieces, and how a parser reads it.

A parser is a generator (`Reading`) that yields when it needs more text. What it does depends on the text only, never on
the pieces in which that comes.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]  # a step of a parser: it yields when it needs more text, and returns a T

SPACE = re.compile(r"[ \t\r\n]+")  # JSON's white space
ANYTHING = re.compile(r".+", re.DOTALL)
BEFORE_TAG = re.compile(r"[^<]+|<")  # a run of text that has no tag, or the first character of what is none


class TextSource:
    """The text of one completion, from a place in it onwards."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._ended = False
        # What was taken since this was last cleared, for a parser that has to give it back as text.
        self.taken: list[str] = []
        self.starved = False  # whether, since this was last cleared, something was looked for beyond the text's end

    def put(self, text: str, *, last: bool) -> None:
        """Add a piece. last: no more comes."""
        self._text = self._text[self._at :] + text
        self._at = 0
        self._ended = last

    def at(self, literal: str) -> Reading[bool]:
        """Whether `literal` comes next. Waits while what is there could still become it."""
        while True:
            have = self._text[self._at : self._at + len(literal)]
            if have == literal or not literal.startswith(have):
                return have == literal
            if self._ended:
                self.starved = True
                return False
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
        while self._at == len(self._text):
            if self._ended:
                self.starved = True
                return ""
            yield
        match = pattern.match(self._text, self._at)
        return self._take(match.group()) if match else ""

    def take_all(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Take all that `pattern` matches from here, whatever pieces it comes in."""
        runs: list[str] = []
        while run := (yield from self.take_run(pattern)):
            runs.append(run)
        return "".join(runs)

    def take_before(self, closing: str, ordinary: re.Pattern[str]) -> Reading[str]:
        """Take a run of the text before `closing`; "" if that comes next, or the text has ended, maybe in it.

        ordinary: matches what cannot begin `closing`, or else one character.
        """
        if (yield from self.at(closing)) or (self._ended and closing.startswith(self._text[self._at :])):
            return ""
        return (yield from self.take_run(ordinary))

    def _take(self, text: str) -> str:
        self.taken.append(text)
        self._at += len(text)
        return text
