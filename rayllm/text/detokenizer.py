"""Text out of token ids as they come, and the search for stop strings in it.

Nearly all models' tokens are bytes: their decoders map each token to bytes, whatever stands beside it (byte-level
BPE, or sentencepiece pieces with byte fallback). Then an incremental UTF-8 decoder does the whole work: exact, and in
constant time a token. Other decoders (WordPiece, Metaspace) spell a token by its neighbours and run over small windows.

`tokenizers.decoders.DecodeStream` does the window for all models, but raises on byte-fallback models that put out a
broken character, and on a run of broken characters takes time in the square of its length.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_CONTEXT_TOKENS = 8  # window decoding: tokens of the prompt that decide how the first new one is spelled
_MAX_PENDING = 16  # window decoding: a character has 4 bytes at most, so this many tokens hold something broken


class ByteRule(NamedTuple):
    """How a decoder turns one token into bytes.

    byte_level: by GPT-2's table of printable characters; otherwise "<0xNN>" is a byte and the rest is UTF-8.
    replacements: (from, to) in a token's text. strip_left: spaces cut off the start of the whole text.
    """

    byte_level: bool
    replacements: tuple[tuple[str, str], ...] = ()
    strip_left: int = 0


def byte_rule(decoder: dict[str, Any] | None) -> ByteRule | None:
    """The rule equal to a decoder of tokenizer.json; None if its tokens are not bytes that stand for themselves."""
    if decoder is None:
        return None
    if decoder["type"] == "ByteLevel":
        return ByteRule(byte_level=True)
    if decoder["type"] != "Sequence":
        return None
    parts = decoder["decoders"]
    if len(parts) == 1:
        return byte_rule(parts[0])
    replacements = []
    while parts and parts[0]["type"] == "Replace" and "String" in parts[0]["pattern"]:
        replacements.append((parts[0]["pattern"]["String"], parts[0]["content"]))
        parts = parts[1:]
    if [part["type"] for part in parts[:2]] != ["ByteFallback", "Fuse"]:
        return None
    strip = parts[2:]
    if not strip:
        return ByteRule(byte_level=False, replacements=tuple(replacements))
    if len(strip) == 1 and strip[0]["type"] == "Strip" and strip[0]["content"] == " " and strip[0]["stop"] == 0:
        return ByteRule(byte_level=False, replacements=tuple(replacements), strip_left=strip[0]["start"])
    return None


def _byte_level_table() -> dict[str, int]:
    """GPT-2's characters for bytes: printable Latin-1 stands for itself, the rest is U+0100 and on, in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_LEVEL = _byte_level_table()


class ByteVocabulary(dict[int, bytes]):
    """Token id -> its bytes, filled on first use; b"" for ids in `skipped` and ids that no token has."""

    def __init__(self, id_to_token: Callable[[int], str | None], rule: ByteRule, skipped: frozenset[int] = frozenset()):
        super().__init__()
        self.rule = rule
        self._id_to_token = id_to_token
        self._skipped = skipped

    def __missing__(self, token_id: int) -> bytes:
        token = None if token_id in self._skipped else self._id_to_token(token_id)
        value = b"" if token is None else self._to_bytes(token)
        self[token_id] = value
        return value

    def _to_bytes(self, token: str) -> bytes:
        if self.rule.byte_level:
            codes = [_BYTE_LEVEL.get(char) for char in token]
            # Added tokens are plain text: any character outside the table makes it UTF-8.
            return token.encode() if None in codes else bytes(code for code in codes if code is not None)
        for old, new in self.rule.replacements:
            token = token.replace(old, new)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        return token.encode()


class IncrementalDetokenizer:
    """Text of one sequence's new tokens, piece by piece, never half a character.

    The pieces and `flush()` together are what decoding prompt and output at once gives after the prompt's text (on
    byte-fallback vocabularies a run of bytes with a broken character may come out with fewer U+FFFD).
    decode: ids -> text. vocabulary: the tokens' bytes, None if they have none. skipped_ids: ids without text.
    prompt_token_ids: what stands before.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        vocabulary: ByteVocabulary | None,
        skipped_ids: frozenset[int],
        prompt_token_ids: Sequence[int] = (),
    ):
        self._text: _ByteText | _WindowText
        if vocabulary is not None:
            self._text = _ByteText(vocabulary, prompt_token_ids)
        else:
            self._text = _WindowText(decode, skipped_ids, prompt_token_ids)

    def step(self, token_ids: Iterable[int]) -> str:
        """Take the next tokens; return the new text, "" while a character is incomplete."""
        return self._text.step(token_ids)

    def flush(self) -> str:
        """The rest at the end of a sequence: U+FFFD for a character that stayed incomplete, otherwise ""."""
        return self._text.flush()


class _ByteText:
    """For vocabularies of bytes. State: at most three bytes in the UTF-8 decoder."""

    def __init__(self, vocabulary: ByteVocabulary, prompt_token_ids: Sequence[int]):
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # Spaces are stripped at the start of the text: after a prompt without text, the output is the start.
        strips = vocabulary.rule.strip_left
        self._strip_left = strips if strips and not any(vocabulary[i] for i in prompt_token_ids) else 0
        tail = b""
        for token in reversed(prompt_token_ids[-_CONTEXT_TOKENS:]):  # a prompt may end within a character
            tail = vocabulary[token] + tail
            if len(tail) >= 4:
                break
        self._decoder.decode(tail)

    def step(self, token_ids: Iterable[int]) -> str:
        vocabulary = self._vocabulary
        text = self._decoder.decode(b"".join([vocabulary[token] for token in token_ids]))
        return self._strip(text) if self._strip_left else text

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)

    def _strip(self, text: str) -> str:
        while self._strip_left and text:
            if text[0] != " ":
                self._strip_left = 0
                break
            text = text[1:]
            self._strip_left -= 1
        return text


class _WindowText:
    """For other decoders: new text is what a window of tokens decodes to beyond what its first part decodes to.

    _context: tokens whose text is out, _prefix: their text within the window; _pending: tokens not out yet.
    """

    def __init__(
        self, decode: Callable[[list[int]], str], skipped_ids: frozenset[int], prompt_token_ids: Sequence[int]
    ):
        self._decode = decode
        self._skipped = skipped_ids
        tail = deque((i for i in prompt_token_ids if i not in skipped_ids), maxlen=_CONTEXT_TOKENS)
        self._context = list(tail)
        self._prefix = decode(self._context)
        self._pending: list[int] = []

    def step(self, token_ids: Iterable[int]) -> str:
        new = [token for token in token_ids if token not in self._skipped]
        if not new:
            return ""
        self._pending += new
        text = self._decode(self._context + self._pending)
        if text.endswith(REPLACEMENT) and len(self._pending) <= _MAX_PENDING:
            return ""
        return self._commit(text)

    def flush(self) -> str:
        return self._commit(self._decode(self._context + self._pending)) if self._pending else ""

    def _commit(self, text: str) -> str:
        # A decoder that respells earlier tokens breaks the prefix; its length is then the best guess.
        new = text[len(self._prefix) :]
        alone = self._decode(self._pending)
        if alone:
            self._context, self._prefix = self._pending, alone
        else:  # no text of their own: keep what stands before, so that the next token is not spelled as a first one
            self._context = (self._context + self._pending)[-2 * _CONTEXT_TOKENS :]
            self._prefix = self._decode(self._context)
        self._pending = []
        return new


class _StopAutomaton(NamedTuple):
    """Aho and Corasick's automaton (CACM 1975) over the stop strings; state 0 is the start.

    moves: state -> char -> state. fallback: state -> the state of its longest proper suffix that begins a stop.
    depth: state -> how many characters of a stop it has. found: state -> longest stop that ends here.
    """

    moves: list[dict[str, int]]
    fallback: list[int]
    depth: list[int]
    found: list[str | None]


@lru_cache(maxsize=64)
def _build_automaton(stops: tuple[str, ...]) -> _StopAutomaton:
    automaton = _StopAutomaton([{}], [0], [0], [None])
    for stop in stops:
        state = 0
        for char in stop:
            if char not in automaton.moves[state]:
                automaton.moves[state][char] = len(automaton.moves)
                automaton.moves.append({})
                automaton.fallback.append(0)
                automaton.depth.append(automaton.depth[state] + 1)
                automaton.found.append(None)
            state = automaton.moves[state][char]
        automaton.found[state] = stop
    queue = deque(automaton.moves[0].values())
    while queue:  # by depth, so that fallbacks point to states that are done
        state = queue.popleft()
        for char, target in automaton.moves[state].items():
            back = automaton.fallback[state]
            while back and char not in automaton.moves[back]:
                back = automaton.fallback[back]
            automaton.fallback[target] = automaton.moves[back].get(char, 0)
            queue.append(target)
        if automaton.found[state] is None:
            automaton.found[state] = automaton.found[automaton.fallback[state]]
    return automaton


class StopChecker:
    """Finds the first stop string in a text that comes in pieces, and holds back what may be the start of one.

    First is the one that ends first, of several that end together the longest; so the result does not depend on
    where the pieces end. include_stop: the stop string itself stays in the text.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False):
        self._automaton = _build_automaton(tuple(stops))
        self._include_stop = include_stop
        self._state = 0
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Take the next piece; return (text that can be shown now, the stop string found or None).

        After a stop was found the checker is done: nothing behind the stop is ever returned.
        """
        moves, fallback, depth, found = self._automaton
        state, buffer = self._state, self._held + text
        for place, char in enumerate(text, start=len(self._held) + 1):
            while state and char not in moves[state]:
                state = fallback[state]
            state = moves[state].get(char, 0)
            stop = found[state]
            if stop is not None:
                self._held = ""
                return buffer[: place if self._include_stop else place - len(stop)], stop
        self._state = state
        shown = len(buffer) - depth[state]
        self._held = buffer[shown:]
        return buffer[:shown], None

    def flush(self) -> str:
        """At the end of the text: what was held back and turned out not to be a stop string."""
        held, self._held = self._held, ""
        return held
