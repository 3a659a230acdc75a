"""`bad_words` as the token sequences by which a model may write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Encoder(Protocol):
    """Of a tokenizer, what this needs."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


def bad_token_ids(words: Sequence[str], tokenizer: Encoder, vocab_size: int) -> list[list[int]]:
    """The tokens of each word at the beginning of a text and behind a space, each sequence once.

    vocab_size: of the model; what it cannot write is left out. Raises InvalidRequestError for text that is not Unicode.
    """
    texts = [text for word in words for text in (word.lstrip(), f" {word.lstrip()}")]
    sequences = {tuple(tokenizer.encode(text, False)): None for text in texts}
    return [list(each) for each in sequences if each and max(each) < vocab_size]
