"""Text from token ids as they come, and the search for stop strings in it.

The tokens of nearly all models are bytes: their decoders map each token to the same bytes whatever stands beside it
(byte-level BPE, or sentencepiece pieces with byte fallback). For them an incremental UTF-8 decoder does all the work:
it is exact and takes constant time a token. Other decoders (WordPiece, Metaspace) spell a token by its neighbours, so
they decode small windows of tokens.

`tokenizers.decoders.DecodeStream` uses a window for every model, but it raises an error where a byte-fallback model
generates a broken character, and its time grows with the square of the length of a run of broken characters.
"""

from __future__ import annotations

import codecs
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_CONTEXT_TOKENS = 8  # tokens of the prompt that decide how the first new token is spelled
_MAX_PENDING = 16  # a character has at most 4 bytes, so this many tokens without a whole one hold a broken one


class ByteRule(NamedTuple):
    """How a decoder turns one token into bytes."""

    # Characters stand for bytes by GPT-2's table. Otherwise "<0xNN>" is a byte and all other text is UTF-8.
    byte_level: bool
    # (from, to): what is replaced in a token's text first.
    replacements: tuple[tuple[str, str], ...] = ()
    # How many spaces are cut off the start of the whole text.
    strip_left: int = 0


def byte_rule(decoder: dict[str, Any] | None) -> ByteRule | None:
    """The rule that does what a decoder of tokenizer.json does; None if its tokens do not stand for bytes."""
    if decoder is None:
        return None
    parts = list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]
    if [part["type"] for part in parts] == ["ByteLevel"]:
        return ByteRule(byte_level=True)
    strip_left = 0
    if parts and parts[-1]["type"] == "Strip" and parts[-1]["content"] == " " and parts[-1]["stop"] == 0:
        strip_left = parts.pop()["start"]
    if [part["type"] for part in parts[-2:]] != ["ByteFallback", "Fuse"]:
        return None
    replaces = parts[:-2]
    if not all(part["type"] == "Replace" and "String" in part["pattern"] for part in replaces):
        return None
    return ByteRule(False, tuple((part["pattern"]["String"], part["content"]) for part in replaces), strip_left)


def _byte_level_table() -> dict[str, int]:
    """GPT-2's characters for bytes: printable Latin-1 stands for itself, U+0100 and on for the rest, in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_LEVEL = _byte_level_table()
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


class ByteVocabulary(dict[int, bytes]):
    """Token id -> its bytes, filled on first use; b"" for ids in `skipped` and ids that no token has."""

    def __init__(self, id_to_token: Callable[[int], str | None], rule: ByteRule, skipped: frozenset[int] = frozenset()):
        super().__init__(dict.fromkeys(skipped, b""))
        self.rule = rule
        self._id_to_token = id_to_token

    def __missing__(self, token_id: int) -> bytes:
        token = self._id_to_token(token_id)
        value = self[token_id] = b"" if token is None else self._to_bytes(token)
        return value

    def _to_bytes(self, token: str) -> bytes:
        if self.rule.byte_level:
            try:
                return bytes([_BYTE_LEVEL[char] for char in token])
            except KeyError:  # an added token, which is plain text
                return token.encode()
        for old, new in self.rule.replacements:
            token = token.replace(old, new)
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes.fromhex(byte[1]) if byte else token.encode()


class ByteDetokenizer:
    """Text of one sequence's new tokens, piece by piece, never half a character. For vocabularies of bytes.

    The pieces together are what decoding prompt and output at once gives after the prompt's text. (On byte-fallback
    vocabularies a run of bytes with a broken character may come out with fewer U+FFFD.)
    The state is at most three bytes in the UTF-8 decoder.
    """

    def __init__(self, vocabulary: ByteVocabulary, prompt_token_ids: Sequence[int]):
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # Spaces are stripped at the start of the text: after a prompt without text, the output is the start.
        strips = vocabulary.rule.strip_left
        self._strip_left = strips if strips and not any(vocabulary[i] for i in prompt_token_ids) else 0
        self.step(prompt_token_ids[-_CONTEXT_TOKENS:])  # a prompt may end within a character

    def step(self, token_ids: Iterable[int], last: bool = False) -> str:
        """Take the next tokens; return the new text, "" while a character is incomplete.

        last: no more tokens come, so a character that stayed incomplete comes out as U+FFFD.
        """
        vocabulary = self._vocabulary
        text = self._decoder.decode(b"".join([vocabulary[token] for token in token_ids]), last)
        return self._strip(text) if self._strip_left and text else text

    def _strip(self, text: str) -> str:
        num_spaces = len(text) - len(text.lstrip(" "))
        shown = text[min(num_spaces, self._strip_left) :]
        self._strip_left = 0 if shown else self._strip_left - num_spaces
        return shown


class WindowDetokenizer:
    """Does what `ByteDetokenizer` does for all other decoders.

    New text is what a window of tokens decodes to, beyond what those of them decode to whose text is out.

    decode: ids -> text. skipped_ids: ids without text.
    """

    def __init__(
        self, decode: Callable[[list[int]], str], skipped_ids: frozenset[int], prompt_token_ids: Sequence[int]
    ):
        self._decode = decode
        self._skipped = skipped_ids
        self._window = [i for i in prompt_token_ids if i not in skipped_ids][-_CONTEXT_TOKENS:]
        self._num_shown = len(self._window)  # the window's first tokens, whose text is out

    def step(self, token_ids: Iterable[int], last: bool = False) -> str:
        """As `ByteDetokenizer.step`."""
        self._window += [token for token in token_ids if token not in self._skipped]
        num_waiting = len(self._window) - self._num_shown
        # A decoder that respells earlier tokens breaks the prefix; its length is then the best guess.
        num_chars, text = len(self._decode(self._window[: self._num_shown])), self._decode(self._window)
        incomplete = len(text) <= num_chars or text.endswith(REPLACEMENT)
        if incomplete and not last and num_waiting <= _MAX_PENDING:
            return ""
        self._window = self._window[self._num_shown :]
        self._num_shown = num_waiting
        return text[num_chars:]


Detokenizer = ByteDetokenizer | WindowDetokenizer


class StopChecker:
    """Finds the first stop string in a text that comes in pieces, and holds back what may be the start of one.

    First is the stop string that ends first, and of several that end together the longest. So the result does not
    depend on where the pieces end. include_stop: the stop string itself stays in the text.

    The text held back is the longest end of the text that begins a stop string, so it is at most as long as the longest
    stop string less one character. Pieces should be short, as the text of a token is.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False):
        self._stops = sorted(stops)
        self._first_chars = frozenset(stop[0] for stop in stops)
        self._max_held = max(map(len, stops)) - 1
        self._include_stop = include_stop
        self._held = ""

    def feed(self, piece: str, last: bool = False) -> tuple[str, str | None]:
        """Take the next piece; return (text that can be shown now, the stop string found or None).

        After a stop string was found the checker is done: nothing behind it is ever returned.
        last: no more text comes, so nothing is held back.
        """
        held, text = len(self._held), self._held + piece
        if self._first_chars.isdisjoint(text):
            return text, None  # nothing was held back, as that would begin with one of them
        found = []
        for stop in self._stops:
            start = text.find(stop, max(0, held - len(stop) + 1))  # it ends within the new piece
            if start >= 0:
                found.append((start + len(stop), start, stop))
        if found:
            end, start, stop = min(found)
            return text[: end if self._include_stop else start], stop
        shown = len(text) if last else max(0, len(text) - self._max_held)
        while shown < len(text) and not self._begins_stop(text[shown:]):
            shown += 1
        self._held = text[shown:]
        return text[:shown], None

    def _begins_stop(self, text: str) -> bool:
        """Whether a stop string starts with the text: if one does, the first in order that is not before the text."""
        place = bisect_left(self._stops, text)
        return place < len(self._stops) and self._stops[place].startswith(text)
