"""Grammars: from what a request asks for (`StructuredOutputs`) to masks of the tokens that may come next.

Whoever may send requests may send grammars, so `GrammarCompiler` compiles on threads of its own, after a trial in
another process (`grammar_trial.py`) that ends a grammar which takes too much time or memory, or crashes the library.
`GrammarConstraint` follows one sequence through its grammar. llguidance releases the interpreter while it computes a
mask, so masks are computed on threads too: neither the engine's loop nor other sequences wait for them.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from rayllm import timeouts
from rayllm.api.sampling_params import StructuredOutputs
from rayllm.errors import InvalidRequestError

PARAM = "structured_outputs"
# Between tokens of JSON text. Without a bound, a model that does not know how to go on writes blanks until max_tokens.
_JSON_OPTIONS = {"whitespace_pattern": r"[ \t\r\n]{1,20}"}
_MAX_REASON_CHARS = 500
# The library's limits on one grammar; reaching one ends the request. They bound a mask to some hundred milliseconds and
# a grammar to some ten MiB. Usual ones take far less: a millisecond and a tenth of a MiB. A place in the text has 4
# items for each property that may still come, so that an object can have 2,500 that are optional.
_PARSER_LIMITS = LLParserLimits(
    max_items_in_row=10_000,
    initial_lexer_fuel=500_000,
    step_lexer_fuel=20_000,
    max_lexer_states=20_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
_REHEARSED_TOKENS = 16
_STRUCTURE = '{[",:}]'  # of JSON; what leads deeper comes first
GRACE_S = 0.002  # an idle engine that has one mask waits this long for the others


class TokenizerData(msgspec.Struct, frozen=True):
    """What a GrammarTokenizer is made of."""

    tokenizer_json: str  # the tokenizers library's own form
    num_tokens: int  # of the tokenizer, added tokens included
    vocab_size: int  # of the model; it decides the size of a mask
    eos_token_ids: list[int]


class GrammarTokenizer:
    """A model's tokens as the library needs them.

    Raises ValueError for a tokenizer whose tokens are not bytes of text. Making one takes up to a second.
    """

    def __init__(self, data: TokenizerData):
        self.data = data
        self.mask_bytes = (data.vocab_size + 31) // 32 * 4
        n_vocab = max(data.num_tokens, data.vocab_size)
        self.tokens = LLTokenizer(data.tokenizer_json, n_vocab=n_vocab, eos_token=data.eos_token_ids)
        self._structural = [self.tokens.greedy_tokenize(char)[0] for char in _STRUCTURE]

    def mask_of(self, matcher: LLMatcher) -> bytes:
        """The tokens that may come next, as StepPlan.masks has them. Raises ValueError if there are none."""
        mask = matcher.compute_bitmask()[: self.mask_bytes]
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        if mask.count(0) == len(mask):
            raise ValueError("no token of the model can continue the text")
        return mask

    def compile(self, structure: StructuredOutputs) -> tuple[LLMatcher, bytes]:
        """A matcher at the beginning of the text, and its mask. Raises InvalidRequestError."""
        try:
            matcher = LLMatcher(self.tokens, _source(structure), log_level=0, limits=_PARSER_LIMITS)
            return matcher, self.mask_of(matcher)
        except ValueError as error:
            raise bad_grammar(str(error)) from None

    def rehearse(self, structure: StructuredOutputs) -> LLMatcher:
        """Compile, and follow the grammar for some tokens, as deep into JSON as it allows. Returns the matcher.

        So a limit that is met in the first tokens refuses the grammar, instead of ending an answer. Raises
        InvalidRequestError.
        """
        matcher, mask = self.compile(structure)
        place = matcher.deep_copy()
        try:
            for _ in range(_REHEARSED_TOKENS):
                allowed = int.from_bytes(mask, "little")
                lowest = (allowed & -allowed).bit_length() - 1
                token = next((token for token in self._structural if allowed >> token & 1), lowest)
                if token in self.data.eos_token_ids:
                    break
                if not place.consume_token(token):
                    raise ValueError(place.get_error())
                mask = self.mask_of(place)
        except ValueError as error:
            raise bad_grammar(str(error)) from None
        return matcher


def bad_grammar(reason: str) -> InvalidRequestError:
    """The refusal of a request for its grammar."""
    reason = reason.replace("<non-verbose/>", "").strip()
    if len(reason) > _MAX_REASON_CHARS:
        reason = reason[:_MAX_REASON_CHARS] + "..."
    return InvalidRequestError(f"{PARAM}: {reason}", PARAM)


def _source(structure: StructuredOutputs) -> str:
    """The library's description of a grammar. Raises ValueError for a schema that is not JSON."""
    if structure.regex is not None:
        return LLMatcher.grammar_from_regex(structure.regex)
    if structure.grammar is not None:
        return LLMatcher.grammar_from_lark(structure.grammar)
    if structure.choice is not None:  # a string in Lark is one in JSON
        return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in structure.choice))
    schema = '{"type": "object"}' if structure.json is None else structure.json
    if schema.strip() in ("true", "false"):  # schemas too, but without options
        return LLMatcher.grammar_from_json_schema(schema)
    return LLMatcher.grammar_from_json_schema(schema, defaults=_JSON_OPTIONS)  # type: ignore[arg-type]


class MaskThreads:
    """Threads that compute masks. `wait` is for an engine that has nothing else to do."""

    def __init__(self, num_threads: int):
        self._pool = ThreadPoolExecutor(num_threads, "rayllm-masks")
        self._changed = threading.Condition()
        self._num_pending = 0  # masks that are still to be computed
        self._some_new = False  # a mask was computed since the last `wait`

    def submit(self, work: Callable[[Sequence[int]], None], tokens: Sequence[int]) -> None:
        """Run work(tokens), which computes one mask and does not raise."""
        with self._changed:
            self._num_pending += 1
        self._pool.submit(self._run, work, tokens)

    def wait(self, timeout: float) -> None:
        """Return when a mask has been computed since the last call, at the latest after `timeout` seconds.

        If others are still to come, they get GRACE_S: one step for all of them is cheaper than one for the first.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._some_new, timeout)
            self._changed.wait_for(lambda: self._num_pending == 0, GRACE_S)
            self._some_new = False

    def close(self) -> None:
        """Let what runs end, and start nothing more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _run(self, work: Callable[[Sequence[int]], None], tokens: Sequence[int]) -> None:
        work(tokens)
        with self._changed:
            self._num_pending -= 1
            if not self._some_new or not self._num_pending:  # `wait` waits for these two only
                self._some_new = True
                self._changed.notify()


@dataclass(eq=False)
class Grammar:
    """A compiled grammar, shared by the sequences that use it. Calling it makes a sequence's constraint."""

    tokenizer: GrammarTokenizer
    matcher: LLMatcher  # at the beginning of the text
    first_mask: bytes
    threads: MaskThreads
    size: int  # an estimate, in bytes
    broken: bool = False  # it reached a limit; its lexer may have grown large
    # Held while the library works on any of its sequences. They share its lexer, whose own lock would be waited for
    # with the interpreter held.
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self) -> GrammarConstraint:
        return GrammarConstraint(self)


class GrammarConstraint:
    """A sequence's place in its grammar; see `rayllm.core.sequence.Constraint`."""

    def __init__(self, grammar: Grammar):
        self._grammar = grammar
        self._matcher: LLMatcher | None = None  # only mask threads use it
        self._mask: bytes | None = grammar.first_mask
        self._error: InvalidRequestError | None = None

    def mask(self) -> bytes | None:
        return self._mask

    def error(self) -> InvalidRequestError | None:
        return self._error

    def accept(self, *tokens: int) -> None:
        self._mask = None
        self._grammar.threads.submit(self._advance, tokens)

    def _advance(self, tokens: Sequence[int]) -> None:
        """On a mask thread; the scheduler sends no further token before the mask is known."""
        grammar = self._grammar
        try:
            with grammar.lock:
                if self._matcher is None:
                    self._matcher = grammar.matcher.deep_copy()
                if not self._matcher.consume_tokens(list(tokens)):
                    raise ValueError(self._matcher.get_error())
                started = time.thread_time()
                mask = grammar.tokenizer.mask_of(self._matcher)
                if time.thread_time() - started > timeouts.MASK_S:
                    raise ValueError(f"computing what may come next takes longer than {timeouts.MASK_S:g} s")
                self._mask = mask
        except BaseException as error:  # a panic of the library is no Exception; the sequence must not wait for ever
            grammar.broken = True
            self._error = bad_grammar(f"its text cannot go on: {str(error) or type(error).__name__}")
