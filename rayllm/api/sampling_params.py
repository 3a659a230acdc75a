"""`SamplingParams`: how the tokens of one request are chosen, validated where it is made."""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec

from rayllm.errors import InvalidRequestError

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOPS = 64
MAX_SEED = 2**63 - 1
MAX_STRUCTURE_BYTES = 64 * 1024  # of a schema, regex or grammar, or of all choices together, as UTF-8
MAX_CHOICES = 1000
MAX_LENGTH_PENALTY = 10.0  # either way; the longest sequences to this power are still far from overflow
GREEDY_EPS = 1e-5  # temperatures below this are greedy: dividing by them would overflow

# Fields that would choose other tokens than beam search does, or end a text before it is chosen -> values that do not.
_WITHOUT_BEAMS: dict[str, tuple[Any, ...]] = {
    "temperature": (0, 1),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": (None, {}),
    "stop": ([],),
    "structured_outputs": (None,),
}


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the text of a completion must look like. Exactly one field is given.

    json: a JSON schema, as text. json_object: True for any JSON object. regex: a regular expression that the whole
    text matches. choice: the text is one of these strings, at most 1,000. grammar: a grammar in Lark's notation, as
    llguidance reads it. Texts are at most 64 KiB as UTF-8.

    Raises InvalidRequestError naming structured_outputs. Whether the schema, expression or grammar itself is valid
    is found when it is compiled, before the request runs.
    """

    json: str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None

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
        if any("\ud800" <= char <= "\udfff" for text in texts for char in text):
            raise _bad_structure(f"{kind} holds lone surrogates, which are not Unicode text")
        size = sum(len(text.encode()) for text in texts)
        if size > MAX_STRUCTURE_BYTES:
            raise _bad_structure(f"{kind} takes at most {MAX_STRUCTURE_BYTES} bytes, not {size}")


def _bad_structure(reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"structured_outputs: {reason}", "structured_outputs")


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of one request; names and defaults follow vLLM.

    n: completions per prompt, 1 to 128. best_of: sequences to choose them from, n (the default) to 128: so many are
    sampled, and the n of the highest log-probability per token are returned, best first.
    use_beam_search: instead of sampling, look for the most likely sequences with best_of beams, at least 2; the n best
    are returned, best first, by cumulative log-probability / tokens ** length_penalty (-10 to 10). early_stopping:
    the search ends when there are best_of finished sequences (True), when the best beam can hardly become better than
    the worst of them (False), or when no beam can ("never"); all as transformers' `generate` does it. Parameters that
    sampling uses cannot be given with it, nor can stop, which looks at text, and structured_outputs.
    temperature: 0 is greedy. top_k: 0 or -1 keeps all tokens.
    top_p, min_p: probability thresholds in (0, 1] and [0, 1]. repetition_penalty: > 0, over prompt and output;
    presence_penalty, frequency_penalty: -2 to 2, over the output. logit_bias: token id -> value added to its logit,
    -100 to 100. min_tokens: neither end-of-sequence nor stop ids before this many tokens. max_tokens: None
    means up to the model's context. stop: strings that end the text (and are cut off it unless
    include_stop_str_in_output). stop_token_ids: ids that end it. logprobs / prompt_logprobs: report the
    log-probabilities of this many top tokens a position (0: only the token itself), at most 20.
    seed: the same seed gives the same tokens, whatever else is in the batch.
    structured_outputs: the form the text must have; None for any text. The sequence ends by itself exactly where the
    form allows it, so min_tokens and ignore_eos cannot be given with it. max_tokens, stop and stop_token_ids may cut
    the text before its form is complete; ids among the latter can only come where the form allows them.

    Raises InvalidRequestError naming the field and its limit.
    """

    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    seed: int | None = None
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            msgspec.structs.force_setattr(self, "stop", [self.stop])
        if self.stop is None:
            msgspec.structs.force_setattr(self, "stop", [])
        if self.stop_token_ids is None:
            msgspec.structs.force_setattr(self, "stop_token_ids", [])
        _check_number("n", self.n, 1, MAX_N, integer=True)
        if self.best_of is not None:
            _check_number("best_of", self.best_of, 1, MAX_N, integer=True)
        _check_number("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        _check_number("temperature", self.temperature, 0.0, 100.0)
        _check_number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_number("top_k", self.top_k, -1, 2**31 - 1, integer=True)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.max_tokens is not None:
            _check_number("max_tokens", self.max_tokens, 1, 2**31 - 1, integer=True)
        _check_number("min_tokens", self.min_tokens, 0, 2**31 - 1, integer=True)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_number(name, getattr(self, name), 0, MAX_LOGPROBS, integer=True)
        if self.seed is not None:
            _check_number("seed", self.seed, 0, MAX_SEED, integer=True)
        for name in ("use_beam_search", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(f"{name} must be true or false, not {getattr(self, name)!r}", name)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise InvalidRequestError(
                f'early_stopping must be true, false or "never", not {repr(self.early_stopping)[:80]}', "early_stopping"
            )
        if not isinstance(self.structured_outputs, StructuredOutputs | None):
            raise _bad_structure(f"must be a StructuredOutputs, not {type(self.structured_outputs).__name__}")
        if self.structured_outputs is not None and (self.ignore_eos or self.min_tokens):
            name = "ignore_eos" if self.ignore_eos else "min_tokens"
            raise InvalidRequestError(
                f"{name} cannot be combined with structured_outputs, which end by themselves", name
            )
        self._check_stops()
        self._check_bias()
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})", "min_tokens"
            )
        if self.width < self.n:
            raise InvalidRequestError(f"best_of must be at least n ({self.n}), not {self.best_of}", "best_of")
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
        for name, neutral in _WITHOUT_BEAMS.items():
            if getattr(self, name) not in neutral:
                raise InvalidRequestError(f"{name} cannot be combined with use_beam_search; leave it out", name)

    def _check_no_beams(self) -> None:
        for name, default in (("length_penalty", 1.0), ("early_stopping", False)):
            if getattr(self, name) != default:
                raise InvalidRequestError(f"{name} is only allowed with use_beam_search", name)
        if self.greedy and self.width > 1:
            name = "n" if self.n > 1 else "best_of"
            raise InvalidRequestError(
                f"{name} must be 1 with temperature 0, where all completions are equal; it is {getattr(self, name)}",
                name,
            )

    def _check_stops(self) -> None:
        if not isinstance(self.stop, list) or not all(isinstance(s, str) and s for s in self.stop):
            raise InvalidRequestError("stop must be a list of non-empty strings", "stop")
        if not isinstance(self.stop_token_ids, list) or not all(_is_int(t) and t >= 0 for t in self.stop_token_ids):
            raise InvalidRequestError("stop_token_ids must be a list of token ids (integers >= 0)", "stop_token_ids")
        for name in ("stop", "stop_token_ids"):
            if len(getattr(self, name)) > MAX_STOPS:
                count = len(getattr(self, name))
                raise InvalidRequestError(f"{name} takes at most {MAX_STOPS} entries, not {count}", name)

    def _check_bias(self) -> None:
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, dict):
            raise InvalidRequestError("logit_bias must map token ids to numbers", "logit_bias")
        if len(self.logit_bias) > 1024:
            raise InvalidRequestError(
                f"logit_bias takes at most 1024 entries, not {len(self.logit_bias)}", "logit_bias"
            )
        for token, value in self.logit_bias.items():
            if not _is_int(token) or token < 0:
                raise InvalidRequestError(f"logit_bias keys must be token ids, not {token!r}", "logit_bias")
            _check_number("logit_bias", value, -100.0, 100.0)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_number(
    name: str, value: Any, low: float, high: float, *, integer: bool = False, open_low: bool = False
) -> None:
    """Raise InvalidRequestError unless value is a finite number in [low, high] (or (low, high] if open_low)."""
    kind = "an integer" if integer else "a number"
    good_type = _is_int(value) if integer else _is_int(value) or isinstance(value, float)
    if not good_type or not math.isfinite(value):
        raise InvalidRequestError(f"{name} must be {kind}, not {value!r}", name)
    if value > high or value < low or (open_low and value == low):
        bounds = f"{'greater than' if open_low else 'at least'} {low:g}"
        if high < 1e9:
            bounds += f" and at most {high:g}"
        raise InvalidRequestError(f"{name} must be {bounds}, not {value!r}", name)
