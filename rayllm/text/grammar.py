"""Grammars: from what a request asks for (`StructuredOutputs`) to masks of the tokens that may come next.

`GrammarCompiler` compiles on threads of its own, after a trial in a process of its own (`grammar_trial.py`): whoever
may send requests may send grammars, and one that takes too long, too much memory or the process itself must end there.
`GrammarConstraint` follows one sequence. llguidance lets go of the interpreter while it computes masks, so they too are
computed on threads, and neither the engine's loop nor its other sequences wait for them.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from rayllm.api.sampling_params import StructuredOutputs
from rayllm.errors import InvalidRequestError

PARAM = "structured_outputs"
# Between tokens of JSON text. Without a bound, a model that is at a loss writes blanks until max_tokens.
_JSON_OPTIONS = {"whitespace_pattern": r"[ \t\r\n]{1,20}"}
_MAX_REASON_CHARS = 500
GRACE_S = 0.002  # an idle engine waits so long for more masks once it has one


def parser_limits() -> LLParserLimits:
    """The library's limits on one grammar; reaching one ends the request.

    They bound a mask to some hundred milliseconds and a grammar to some ten MiB, far beyond what usual ones take: a
    millisecond and a tenth of a MiB.
    """
    return LLParserLimits(
        initial_lexer_fuel=500_000,
        step_lexer_fuel=20_000,
        max_lexer_states=20_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


class GrammarTokenizer:
    """A model's tokens as the library needs them.

    tokenizer_json: the tokenizers library's form. vocab_size: of the model, which decides the size of a mask.
    Raises ValueError for a tokenizer whose tokens are not bytes of text. Making one takes up to a second.
    """

    def __init__(self, tokenizer_json: str, num_tokens: int, vocab_size: int, eos_token_ids: list[int]):
        self.mask_bytes = (vocab_size + 31) // 32 * 4
        self.tokens = LLTokenizer(tokenizer_json, n_vocab=max(num_tokens, vocab_size), eos_token=eos_token_ids)

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
            matcher = LLMatcher(self.tokens, _source(structure), log_level=0, limits=parser_limits())
            if matcher.is_error():
                raise ValueError(matcher.get_error())
            return matcher, self.mask_of(matcher)
        except ValueError as error:
            raise bad_grammar(str(error)) from None


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
        self._lock = threading.Lock()
        self._pending = 0  # masks asked for and not known yet
        self._some, self._all = threading.Event(), threading.Event()

    def submit(self, work: Callable[[int], None], token: int) -> None:
        """Run work(token), which computes one mask and does not raise."""
        with self._lock:
            self._pending += 1
            self._all.clear()
        self._pool.submit(self._run, work, token)

    def wait(self, timeout: float) -> None:
        """Return when a mask has become known since the last call, at the latest after `timeout` seconds.

        If others are to come, they get GRACE_S: one step for all of them is cheaper than one for the first.
        """
        self._some.wait(timeout)
        self._some.clear()
        self._all.wait(GRACE_S)

    def close(self) -> None:
        """Let what runs end, and start nothing more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _run(self, work: Callable[[int], None], token: int) -> None:
        work(token)
        with self._lock:
            self._pending -= 1
            if not self._pending:
                self._all.set()
        self._some.set()


class Grammar:
    """A compiled grammar, shared by the sequences that use it. Calling it makes a sequence's constraint.

    lock: held while the library works on any of its sequences. They share its lexer, whose own lock would be waited for
    with the interpreter held. size: bytes, an estimate. broken: it reached a limit; its lexer may have grown large.
    """

    def __init__(self, tokenizer: GrammarTokenizer, matcher: LLMatcher, mask: bytes, threads: MaskThreads, size: int):
        self.tokenizer, self.matcher, self.first_mask = tokenizer, matcher, mask
        self.threads, self.size = threads, size
        self.lock = threading.Lock()
        self.broken = False

    def __call__(self) -> GrammarConstraint:
        return GrammarConstraint(self)


class GrammarConstraint:
    """A sequence's place in its grammar; see `rayllm.core.constraint.Constraint`."""

    def __init__(self, grammar: Grammar):
        self._grammar = grammar
        self._matcher: LLMatcher | None = None  # a mask thread's
        self._mask: bytes | None = grammar.first_mask
        self._error: str | None = None

    def mask(self) -> bytes | None:
        return self._mask

    def error(self) -> str | None:
        return self._error

    def accept(self, token: int) -> None:
        self._mask = None
        self._grammar.threads.submit(self._advance, token)

    def _advance(self, token: int) -> None:
        """On a mask thread; the scheduler sends no further token before the mask is known."""
        grammar = self._grammar
        try:
            with grammar.lock:
                if self._matcher is None:
                    self._matcher = grammar.matcher.deep_copy()
                if not self._matcher.consume_token(token):
                    raise ValueError(self._matcher.get_error())
                self._mask = grammar.tokenizer.mask_of(self._matcher)
        except BaseException as error:  # a panic of the library is no Exception; the sequence must not wait for ever
            grammar.broken = True
            self._error = str(bad_grammar(str(error) or type(error).__name__))
