"""`SamplingParams`: how the tokens of one request are chosen, validated where it is made."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from rayllm.errors import InvalidRequestError

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOPS = 64
# Of all stop strings together. The event loop of the front looks for them. That takes about 30 us a token at worst,
# with 64 stop strings that all begin as the text does, and usually less than 1 us.
MAX_STOP_CHARS = 16 * 1024
MAX_BIASES = 1024
MAX_ALLOWED_TOKENS = 16_384
MAX_BAD_WORDS = 64
MAX_BAD_WORD_CHARS = 4096  # of all bad words together; the engine compares their tokens with each one generated
MAX_SEED = 2**63 - 1
MAX_STRUCTURE_BYTES = 64 * 1024  # of a schema, regex or grammar, or of all choices together, as UTF-8
MAX_CHOICES = 1000
MAX_LENGTH_PENALTY = 10.0  # either way; the longest sequences to this power are still far from overflow
GREEDY_EPS = 1e-5  # temperatures below this are greedy: dividing by them would overflow


def derive_seed(seed: int, index: int) -> int:
    """One of many seeds that follow from one and are independent of it and of each other, but for index 0: itself."""
    if index == 0:
        return seed
    digest = hashlib.sha256(f"{seed}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") & MAX_SEED


class _Range(msgspec.Struct, frozen=True):
    """The finite numbers that a field may have, from low to high. It is part of the field's declaration."""

    low: float
    high: float
    without_low: bool = False  # low itself is no valid value

    def check(self, name: str, value: Any, kinds: Collection[type]) -> None:
        """Raise InvalidRequestError, which names the field and its bounds, for any other value.

        kinds: of the field, which takes integers alone unless float is among them, and None if NoneType is.
        """
        if value is None and NoneType in kinds:
            return
        if not _is_int(value) and (float not in kinds or not isinstance(value, float) or not math.isfinite(value)):
            raise _bad(name, f"must be {'a number' if float in kinds else 'an integer'}, not {value!r}")
        if value > self.high or value < self.low or (self.without_low and value == self.low):
            bounds = f"{'greater than' if self.without_low else 'at least'} {self.low:g}"
            if self.high < 1e9:
                bounds += f" and at most {self.high:g}"
            raise _bad(name, f"must be {bounds}, not {value!r}")


_BIAS = _Range(-100, 100)
_MAX_ENTRIES = {
    "stop": MAX_STOPS,
    "stop_token_ids": MAX_STOPS,
    "logit_bias": MAX_BIASES,
    "allowed_token_ids": MAX_ALLOWED_TOKENS,
    "bad_words": MAX_BAD_WORDS,
}

# Fields that cannot be given with beam search, as they would choose other tokens or end a text before it is chosen.
_OF_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_WITHOUT_BEAMS = (*_OF_SAMPLING, "logit_bias", "stop", "structured_outputs", "allowed_token_ids", "bad_words")
_ALSO_NEUTRAL = {"temperature": 0, "top_k": -1, "logit_bias": {}}  # change nothing there either, beside the defaults


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the text of a completion must look like. Exactly one field is given; its texts have at most 64 KiB as UTF-8.

    Raises InvalidRequestError naming structured_outputs. Whether the schema, expression or grammar itself is valid
    is found when it is compiled, before the request runs.
    """

    json: str | None = None  # a JSON schema, as text
    json_object: bool = False  # any JSON object
    regex: str | None = None  # a regular expression that the whole text matches
    choice: list[str] | None = None  # the text is one of these strings, at most 1,000
    grammar: str | None = None  # a grammar in Lark's notation, as llguidance reads it

    def __post_init__(self) -> None:
        if not isinstance(self.json_object, bool):
            raise _bad_structure(f"json_object must be true or false, not {self.json_object!r}")
        given = [name for name in self.__struct_fields__ if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            found = f"found {', '.join(given)}" if given else "found none"
            raise _bad_structure(f"give exactly one of {', '.join(self.__struct_fields__)}; {found}")
        kind, value = given[0], getattr(self, given[0])
        texts = value if kind == "choice" else [] if kind == "json_object" else [value]
        if kind == "choice" and (not isinstance(texts, list) or not texts):
            raise _bad_structure("choice must be a list of strings, at least one")
        if len(texts) > MAX_CHOICES:
            raise _bad_structure(f"choice takes at most {MAX_CHOICES} strings, not {len(texts)}")
        if not all(isinstance(text, str) and text for text in texts):
            raise _bad_structure(f"{kind} must {'hold only non-empty strings' if kind == 'choice' else 'be text'}")
        try:
            size = sum(len(text.encode()) for text in texts)
        except UnicodeEncodeError:
            raise _bad_structure(f"{kind} holds lone surrogates, which are not Unicode text") from None
        if size > MAX_STRUCTURE_BYTES:
            raise _bad_structure(f"{kind} takes at most {MAX_STRUCTURE_BYTES} bytes, not {size}")


def _bad_structure(reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"structured_outputs: {reason}", "structured_outputs")


def _bad(name: str, reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name} {reason}", name)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of one request; names and defaults follow vLLM. Raises InvalidRequestError naming field and limit.

    Beam search follows transformers' `generate`. Parameters of sampling cannot be given with it, nor can stop, which
    looks at text, and structured_outputs.

    With structured_outputs a sequence ends by itself exactly where the form allows it, so min_tokens and ignore_eos
    cannot be given with it. max_tokens, stop and stop_token_ids may cut the text before its form is complete; ids among
    the latter can only come where the form allows them.
    """

    # Completions of a prompt, 1 to 128.
    n: Annotated[int, _Range(1, MAX_N)] = 1
    # Sequences to choose them from, n (the default) to 128. The n of the highest log-probability per token are given.
    best_of: Annotated[int | None, _Range(1, MAX_N)] = None
    # Look for the most likely sequences, with best_of beams (2 or more), instead of sampling.
    use_beam_search: bool = False
    # Beams are ranked by cumulative log-probability / tokens ** length_penalty, -10 to 10.
    length_penalty: Annotated[float, _Range(-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)] = 1.0
    # When beam search ends: when there are best_of finished sequences (True), when the best beam can hardly become
    # better than the worst of them (False), or when no beam can ("never").
    early_stopping: bool | Literal["never"] = False
    # 0 is greedy; at most 100.
    temperature: Annotated[float, _Range(0, 100)] = 1.0
    # Sample from the most likely tokens that together have this probability, (0, 1].
    top_p: Annotated[float, _Range(0, 1, without_low=True)] = 1.0
    # Sample from so many most likely tokens; 0 or -1 keeps all.
    top_k: Annotated[int, _Range(-1, 2**31 - 1)] = 0
    # Leave out tokens with less than this times the probability of the most likely one, [0, 1].
    min_p: Annotated[float, _Range(0, 1)] = 0.0
    # Divides or multiplies the logits of tokens in prompt and output, (0, 100]; 1 changes nothing.
    repetition_penalty: Annotated[float, _Range(0, 100, without_low=True)] = 1.0
    # Taken from the logits of tokens that the output has, -2 to 2.
    presence_penalty: Annotated[float, _Range(-2, 2)] = 0.0
    # Taken from the logits of tokens once for each time that the output has them, -2 to 2.
    frequency_penalty: Annotated[float, _Range(-2, 2)] = 0.0
    # Token id -> value added to its logit, -100 to 100; at most 1,024 of them.
    logit_bias: dict[int, float] | None = None
    # Only these tokens may come, at most 16,384; end-of-sequence too only if it is among them. None for all tokens.
    allowed_token_ids: list[int] | None = None
    # Words that the text must not have, at most 64 with 4,096 characters in all. The last token of a word, as it is
    # written at the beginning of a text or behind a space, does not come where those before it were just generated.
    bad_words: list[str] = []
    # None means up to the model's context.
    max_tokens: Annotated[int | None, _Range(1, 2**31 - 1)] = 16
    # Neither end-of-sequence nor stop ids come before so many tokens; stop strings are sought in what follows them.
    min_tokens: Annotated[int, _Range(0, 2**31 - 1)] = 0
    # Strings that end the text and are cut off it, at most 64, with 16,384 characters in all.
    stop: list[str] = []
    # Token ids that end the text, at most 64.
    stop_token_ids: list[int] = []
    # Go on after end-of-sequence.
    ignore_eos: bool = False
    # The stop string, or the text of the stop id, stays in the text.
    include_stop_str_in_output: bool = False
    # Special tokens are left out of the text.
    skip_special_tokens: bool = True
    # Report the log-probabilities of so many top tokens a position, 0 to 20; 0 is the token itself alone.
    logprobs: Annotated[int | None, _Range(0, MAX_LOGPROBS)] = None
    # The same for the prompt.
    prompt_logprobs: Annotated[int | None, _Range(0, MAX_LOGPROBS)] = None
    # The same seed gives the same tokens, whatever else is in the batch.
    seed: Annotated[int | None, _Range(0, MAX_SEED)] = None
    # The form that the text must have; None for any text.
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            msgspec.structs.force_setattr(self, "stop", [self.stop])
        for name in ("stop", "stop_token_ids", "bad_words"):
            if getattr(self, name) is None:
                msgspec.structs.force_setattr(self, name, [])
        for name, (allowed, kinds) in _NUMBERS.items():
            allowed.check(name, getattr(self, name), kinds)
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise _bad(name, f"must be true or false, not {getattr(self, name)!r}")
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise _bad("early_stopping", f'must be true, false or "never", not {repr(self.early_stopping)[:80]}')
        if not isinstance(self.structured_outputs, StructuredOutputs | None):
            raise _bad_structure(f"must be a StructuredOutputs, not {type(self.structured_outputs).__name__}")
        if self.structured_outputs is not None and (self.ignore_eos or self.min_tokens):
            name = "ignore_eos" if self.ignore_eos else "min_tokens"
            raise _bad(name, "cannot be combined with structured_outputs, which end by themselves")
        self._check_collections()
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _bad("min_tokens", f"({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})")
        if self.width < self.n:
            raise _bad("best_of", f"must be at least n ({self.n}), not {self.best_of}")
        if self.use_beam_search:
            self._check_beams()
        else:
            self._check_no_beams()

    @property
    def width(self) -> int:
        """Sequences that run at once: samples or beams."""
        return self.n if self.best_of is None else self.best_of

    @property
    def num_completions(self) -> int:
        """Completions that the engine reports. The n best of several samples are chosen where their text ends."""
        return self.n if self.use_beam_search else self.width

    @property
    def greedy(self) -> bool:
        """True if nothing is drawn: beam search, or the most likely token is always taken."""
        return self.use_beam_search or self.temperature < GREEDY_EPS

    @property
    def penalised(self) -> bool:
        """True if the tokens so far change the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def _check_beams(self) -> None:
        if self.width < 2:
            raise InvalidRequestError(
                f"use_beam_search needs at least 2 beams; best_of, or else n, is their number, and it is {self.width}",
                "use_beam_search" if self.best_of is None else "best_of",
            )
        for name in _WITHOUT_BEAMS:
            default = getattr(_DEFAULTS, name)
            if getattr(self, name) not in (default, _ALSO_NEUTRAL.get(name, default)):
                raise _bad(name, "cannot be combined with use_beam_search; leave it out")

    def _check_no_beams(self) -> None:
        for name, default in (("length_penalty", 1.0), ("early_stopping", False)):
            if getattr(self, name) != default:
                raise _bad(name, "is only allowed with use_beam_search")
        if self.greedy and self.width > 1:
            name = "n" if self.n > 1 else "best_of"
            many = getattr(self, name)
            raise _bad(name, f"must be 1 with temperature 0, where all completions are equal; it is {many}")

    def _check_collections(self) -> None:
        if not isinstance(self.stop, list) or not all(isinstance(s, str) for s in self.stop):
            raise _bad("stop", "must be a string or a list of strings")
        if "" in self.stop:
            raise _bad("stop", "must not hold an empty string; leave it out to stop at no string")
        for name in ("stop_token_ids", "allowed_token_ids"):
            ids = getattr(self, name)
            if ids is not None and (not isinstance(ids, list) or not all(_is_int(t) and t >= 0 for t in ids)):
                raise _bad(name, "must be a list of token ids (integers >= 0)")
        if self.allowed_token_ids == []:
            raise _bad("allowed_token_ids", "must have at least one token id; leave it out to allow all")
        if not isinstance(self.bad_words, list) or not all(isinstance(s, str) and s.strip() for s in self.bad_words):
            raise _bad("bad_words", "must be a list of strings, none of them blank")
        if not isinstance(self.logit_bias, dict | None):
            raise _bad("logit_bias", "must map token ids to numbers")
        for name, limit in _MAX_ENTRIES.items():
            count = len(getattr(self, name) or ())
            if count > limit:
                raise _bad(name, f"takes at most {limit} entries, not {count}")
        size = sum(map(len, self.stop))
        if size > MAX_STOP_CHARS:
            raise _bad("stop", f"strings may have {MAX_STOP_CHARS} characters in all, not {size}")
        size = sum(map(len, self.bad_words))
        if size > MAX_BAD_WORD_CHARS:
            raise _bad("bad_words", f"may have {MAX_BAD_WORD_CHARS} characters in all, not {size}")
        for token, value in (self.logit_bias or {}).items():
            if not _is_int(token) or token < 0:
                raise _bad("logit_bias", f"keys must be token ids, not {token!r}")
            _BIAS.check("logit_bias", value, (float,))


_FIELDS = get_type_hints(SamplingParams, include_extras=True)
_NUMBERS: dict[str, tuple[_Range, tuple[type, ...]]] = {
    name: (kind.__metadata__[0], get_args(kind.__origin__) or (kind.__origin__,))
    for name, kind in _FIELDS.items()
    if get_origin(kind) is Annotated
}
_FLAGS = [name for name, kind in _FIELDS.items() if kind is bool]
_DEFAULTS = SamplingParams()
