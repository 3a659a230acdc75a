"""`TextSource`: text that arrives piece by piece, for parsers written as generators.

A parser's generator yields when it needs more text and goes on after `put` or `end`. It decides on characters, never on
where a piece ended, so the same text gives the same result in whatever pieces it comes.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]

SPACE = re.compile(r"[ \t\r\n]+")  # JSON's white space
ANYTHING = re.compile(r".+", re.DOTALL)


class TextSource:
    """taken: the pieces taken since it was last cleared, for a parser that has to give them back as text."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._ended = False
        self.taken: list[str] = []

    def put(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self) -> None:
        """No more text comes."""
        self._ended = True

    def peek(self) -> Reading[str]:
        """The next character; "" at the end."""
        while self._at == len(self._text) and not self._ended:
            yield
        return self._text[self._at : self._at + 1]

    def at(self, literal: str) -> Reading[bool]:
        """Whether `literal` comes next. Waits while what is there could still become it."""
        while True:
            have = self._text[self._at : self._at + len(literal)]
            if have == literal:
                return True
            if self._ended or not literal.startswith(have):
                return False
            yield

    def take(self, literal: str) -> Reading[bool]:
        """Take `literal` if it comes next."""
        found = yield from self.at(literal)
        if found:
            self._advance(len(literal))
        return found

    def take_char(self) -> Reading[str]:
        """Take the next character; "" at the end."""
        char = yield from self.peek()
        self._advance(len(char))
        return char

    def take_run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Take what `pattern` matches of the text at hand, to be called until it gives "": no match, or the end."""
        yield from self.peek()
        match = pattern.match(self._text, self._at)
        run = match.group() if match else ""
        self._advance(len(run))
        return run

    def take_all(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Take all that `pattern` matches from here, whatever pieces it comes in."""
        runs: list[str] = []
        while run := (yield from self.take_run(pattern)):
            runs.append(run)
        return "".join(runs)

    def _advance(self, count: int) -> None:
        if count:
            self.taken.append(self._text[self._at : self._at + count])
            self._at += count
