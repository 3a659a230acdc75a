"""Incremental text is the text of the whole, never half a character; stop strings are found whatever the pieces."""

from __future__ import annotations

import json
import time

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from rayllm.text.detokenizer import StopChecker, byte_rule
from rayllm.text.tokenizer import Tokenizer

BAD = "\N{REPLACEMENT CHARACTER}"
EMOJI = "👩‍👩‍👧 e\u0301 日本語 😀"
SPECIAL = ["<s>", "</s>"]
text_strategy = st.one_of(st.text(max_size=30), st.text(alphabet=EMOJI + " ab", max_size=30))


def byte_level() -> Tokenizer:
    """All bytes, some pieces that begin or end within a character, special and added tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    (spelled, _), *_rest = split("日本")
    merges = [(spelled[0], spelled[1]), (spelled[2], spelled[3]), ("a", "b"), ("Ġ", "ab")]
    vocab = {token: i for i, token in enumerate([*SPECIAL, *alphabet, *(left + right for left, right in merges)])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    backend.add_tokens([AddedToken(text, special=False) for text in ("<think>", "né ä", "ÿ")])
    return Tokenizer(backend)


def sentencepiece_like(decoder) -> Tokenizer:
    """Pieces with "▁" for spaces; the rest falls back to bytes."""
    tokens = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "é", "▁a", "▁ab", "▁▁"]
    merges = [("▁", "a"), ("▁a", "b"), ("▁", "▁")]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoder
    backend.add_special_tokens(["<unk>", *SPECIAL])
    return Tokenizer(backend)


def fallback_decoder(*more):
    return decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *more])


def word_piece() -> Tokenizer:
    tokens = ["[UNK]", *SPECIAL, "un", "##able", "##s", "word", ".", "can", "'", "t"]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.add_special_tokens(SPECIAL)
    return Tokenizer(backend)


BYTE_LEVEL = byte_level()
LLAMA_LIKE = sentencepiece_like(fallback_decoder(decoders.Strip(" ", 1, 0)))
GEMMA_LIKE = sentencepiece_like(fallback_decoder())
METASPACE = sentencepiece_like(decoders.Metaspace(prepend_scheme="first"))
WORD_PIECE = word_piece()
SENTENCEPIECE = {"llama": LLAMA_LIKE, "gemma": GEMMA_LIKE, "metaspace": METASPACE}


def pieces_of(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None, skip: bool = True) -> list[str]:
    """The pieces, one a token, and what comes at the end."""
    detokenizer = tokenizer.detokenizer(prompt or [], skip)
    return [*(detokenizer.step([i]) for i in ids), detokenizer.step([], last=True)]


def test_the_tokenizers_take_the_path_they_are_meant_for():
    all_five = (BYTE_LEVEL, LLAMA_LIKE, GEMMA_LIKE, METASPACE, WORD_PIECE)
    rules = [byte_rule(json.loads(tokenizer.backend.to_str())["decoder"]) for tokenizer in all_five]
    found = [rule and (rule.byte_level, rule.strip_left) for rule in rules]
    assert found == [(True, 0), (False, 1), (False, 0), None, None]
    assert byte_rule(None) is None
    assert byte_rule({"type": "Sequence", "decoders": [{"type": "ByteLevel"}]}) == byte_rule({"type": "ByteLevel"})


@settings(max_examples=400, deadline=None)
@given(st.lists(st.integers(0, BYTE_LEVEL.vocab_size + 2), max_size=20), st.booleans(), st.data())
def test_byte_level_random_ids(ids, skip, data):
    whole = BYTE_LEVEL.decode(ids, skip)
    assert "".join(pieces_of(BYTE_LEVEL, ids, skip=skip)) == whole
    cut = data.draw(st.integers(0, len(ids)))
    detokenizer = BYTE_LEVEL.detokenizer([], skip)
    assert detokenizer.step(ids[:cut]) + detokenizer.step(ids[cut:], last=True) == whole


@settings(max_examples=400, deadline=None)
@given(text_strategy, text_strategy)
def test_byte_level_text(prompt, text):
    ids = BYTE_LEVEL.encode(text)
    pieces = pieces_of(BYTE_LEVEL, ids, BYTE_LEVEL.encode(prompt))
    whole = BYTE_LEVEL.decode(ids)
    assert "".join(pieces) == whole
    assert whole == text or any(special in text for special in [*SPECIAL, "ÿ"])  # added tokens of one's own making
    if BAD not in whole:
        assert not any(BAD in piece for piece in pieces), "half a character was shown"
    assert pieces[-1] == ""


@pytest.mark.parametrize("name", SENTENCEPIECE)
@settings(max_examples=300, deadline=None)
@given(prompt=text_strategy, text=text_strategy, bos=st.booleans(), cut=st.integers(0, 30))
def test_sentencepiece_text(name, prompt, text, bos, cut):
    tokenizer = SENTENCEPIECE[name]
    if name == "metaspace":  # its decoder knows no bytes: keep to its letters
        prompt, text = ("".join(c for c in s if c in " ab") for s in (prompt, text))
    ids = [1] * bos + tokenizer.encode(prompt + text)
    cut = min(cut, len(ids))
    before, after = tokenizer.decode(ids[:cut]), tokenizer.decode(ids)
    if BAD in before and BAD not in prompt + text:
        return  # the prompt ends within a character: a test of its own
    pieces = pieces_of(tokenizer, ids[cut:], ids[:cut])
    assert before + "".join(pieces) == after
    if BAD not in text + prompt:
        assert not any(BAD in piece for piece in pieces)


@pytest.mark.parametrize("name", ["llama", "gemma"])
@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, LLAMA_LIKE.vocab_size - 1), max_size=20))
def test_byte_fallback_random_ids(name, ids):
    # A run of bytes with one broken character is all U+FFFD for the library, even what was shown long ago.
    tokenizer = SENTENCEPIECE[name]
    shown = [tokenizer.token_bytes(i) for i in ids if i not in tokenizer.special_ids]
    expected = b"".join(shown).decode(errors="replace")
    if name == "llama" and expected.startswith(" "):
        expected = expected[1:]
    assert "".join(pieces_of(tokenizer, ids)) == expected


def test_leading_spaces():
    ab = LLAMA_LIKE.backend.token_to_id("▁ab")
    for tokenizer, at_start in ((LLAMA_LIKE, "ab ab"), (GEMMA_LIKE, " ab ab"), (METASPACE, "ab ab")):
        assert "".join(pieces_of(tokenizer, [ab, ab])) == at_start
        assert "".join(pieces_of(tokenizer, [ab, ab], prompt=[1])) == at_start, "BOS is no text"
        assert "".join(pieces_of(tokenizer, [ab, ab], prompt=[1, ab])) == " ab ab"
        assert "".join(pieces_of(tokenizer, [ab, 2, ab], prompt=[ab, 2])) == " ab ab", "special tokens take no space"
    assert "".join(pieces_of(METASPACE, [ab, 10**6, ab], prompt=[ab])) == " ab ab", "neither do unknown ids"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, WORD_PIECE.vocab_size - 1), max_size=12), st.integers(0, 12), st.booleans())
def test_word_piece(ids, cut, skip):
    before = WORD_PIECE.decode(ids[:cut], skip)
    assert before + "".join(pieces_of(WORD_PIECE, ids[cut:], ids[:cut], skip)) == WORD_PIECE.decode(ids, skip)


def test_special_tokens_are_spelled_out_if_asked_for():
    ids = BYTE_LEVEL.encode("a</s>b")
    assert "".join(pieces_of(BYTE_LEVEL, ids, skip=True)) == "ab"
    assert "".join(pieces_of(BYTE_LEVEL, ids, skip=False)) == "a</s>b"


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, LLAMA_LIKE])
def test_incomplete_characters(tokenizer):
    ids = tokenizer.encode("\N{SNOWMAN}", add_special_tokens=False)[-3:]
    assert pieces_of(tokenizer, ids) == ["", "", "\N{SNOWMAN}", ""]
    assert pieces_of(tokenizer, ids[:2]) == ["", "", BAD], "shown at the end"
    assert pieces_of(tokenizer, [*ids[:1], *ids]) == ["", BAD, "", "\N{SNOWMAN}", ""], "shown as soon as it is hopeless"
    assert pieces_of(tokenizer, ids[1:], prompt=ids[:1]) == ["", "\N{SNOWMAN}", ""], "the prompt ends within it"
    assert pieces_of(tokenizer, ids[2:], prompt=ids[:2]) == ["\N{SNOWMAN}", ""]
    snow = tokenizer.encode("x" + BAD)
    letter = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"b")
    assert pieces_of(tokenizer, [letter], prompt=snow) == ["b", ""], "no echo of the prompt"


def test_window_gives_up_on_what_stays_broken():
    byte = METASPACE.backend.token_to_id("<0xE2>")  # this decoder spells it out
    assert pieces_of(METASPACE, [byte])[0] == "<0xE2>"
    backend = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, BAD: 1, "a": 2}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    tokenizer = Tokenizer(backend)
    ids = [1] * 40 + [2]
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert max(map(len, pieces)) < 40


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, LLAMA_LIKE])
def test_endless_broken_characters_take_linear_time(tokenizer):
    token = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"\x82")
    detokenizer = tokenizer.detokenizer()
    started = time.monotonic()
    text = "".join(detokenizer.step([token]) for _ in range(50_000))
    assert text == BAD * 50_000
    assert time.monotonic() - started < 2


# ---- stop strings


def naive_stop(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Read character by character until some stop string ends; the longest of several."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=600, deadline=None)
@given(
    st.lists(st.text(alphabet="abc", max_size=5), max_size=8),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=4),
    st.booleans(),
)
def test_stops_are_found_whatever_the_pieces(pieces, stops, include):
    expected, expected_stop = naive_stop("".join(pieces), stops, include)
    checker = StopChecker(stops, include)
    shown, found, fed = "", None, ""
    for piece in pieces:
        fed += piece
        new, found = checker.feed(piece)
        shown += new
        assert expected.startswith(shown), "a part of a stop string was shown"
        if found is not None:
            break
        held = fed[len(shown) :]
        wanted = max(k for k in range(len(fed) + 1) if k == 0 or any(s.startswith(fed[len(fed) - k :]) for s in stops))
        assert len(held) == wanted, "no more is held back than can become a stop string"
    if found is None:
        new, found = checker.feed("", last=True)
        shown += new
    assert (shown, found) == (expected, expected_stop)


def test_stop_examples():
    checker = StopChecker(["\n\nUser:", "</end>"])
    assert checker.feed("Hi\n") == ("Hi", None)
    assert checker.feed("\nUs") == ("", None)
    assert checker.feed("ually") == ("\n\nUsually", None)
    assert checker.feed(" </en") == (" ", None)
    assert checker.feed("d> more") == ("", "</end>")
    assert StopChecker(["stop"], include_stop=True).feed("please stop now") == ("please stop", "stop")
    assert StopChecker(["bcd", "c"]).feed("abcd") == ("ab", "c"), "the one that ends first"
    assert StopChecker(["cd", "bcd"]).feed("abcd") == ("a", "bcd"), "the longest of those that end together"


@pytest.mark.parametrize(
    ("stops", "text", "num_shown"),
    [
        (["a" * 8000 + "b", "a" * 7999 + "c"], "a", 30_000 - 8000),
        (["a" * 255 + chr(256 + i) for i in range(64)], "a", 30_000 - 255),
        (["a" * 255 + chr(256 + i) for i in range(64)], "a" * 255 + "b", 30_000 - 30_000 % 256),
    ],
)
def test_hostile_stops_take_linear_time(stops, text, num_shown):
    """A piece takes about 30 us at most, measured on a slow core; here it may take 200."""
    checker = StopChecker(stops)
    started = time.monotonic()
    shown = "".join(checker.feed(text[i % len(text)])[0] for i in range(30_000))
    assert len(shown) == num_shown
    assert time.monotonic() - started < 6


def test_a_long_piece_takes_linear_time():
    checker = StopChecker(["ab" * 100 + "c"])
    started = time.monotonic()
    assert len(checker.feed("ab" * 500_000)[0]) == 1_000_000 - 200
    assert time.monotonic() - started < 1
