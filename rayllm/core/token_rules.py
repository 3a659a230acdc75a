"""`TokenRules`: `allowed_token_ids` and `bad_words` of a request, as a constraint on each of its completions.

A word is forbidden as vLLM defines it: by the token sequences that it may be written as. The last token of one may not
come where those before it were just generated. Tokens of the prompt do not count as generated.
"""

from __future__ import annotations

from collections.abc import Iterable

from rayllm.api.types import GenerationRequest
from rayllm.core.sequence import Constraint, MakeConstraint
from rayllm.errors import InvalidRequestError


def has_rules(request: GenerationRequest) -> bool:
    """Whether a request needs `TokenRules`."""
    return request.params.allowed_token_ids is not None or bool(request.bad_token_ids)


class TokenRules:
    """What a request's rules allow. Calling it makes the constraint of one of its completions.

    vocab_size: of the model. eos_token_ids: its end-of-sequence tokens. grammar: makes the constraints of the request's
    grammar, if it has one, whose first mask is known; both hold. Raises InvalidRequestError if no token is left to
    begin with.
    """

    def __init__(
        self,
        request: GenerationRequest,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        grammar: MakeConstraint | None = None,
    ):
        params = request.params
        self.mask_bytes = (vocab_size + 31) // 32 * 4
        self.param = "bad_words" if params.bad_words else "allowed_token_ids"
        self.min_tokens = params.min_tokens
        ids = params.allowed_token_ids
        self.allowed = (1 << vocab_size) - 1 if ids is None else _bits(ids, self.mask_bytes)
        self.allowed &= ~_bits((each[0] for each in request.bad_token_ids if len(each) == 1), self.mask_bytes)
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
        self.allowed_early = self.allowed & ~_bits(ends, self.mask_bytes)  # before min_tokens
        # Token -> the forbidden sequences in which it stands before the last one.
        self.forbidden: dict[int, list[list[int]]] = {}
        for sequence in request.bad_token_ids:
            if len(sequence) > 1:
                self.forbidden.setdefault(sequence[-2], []).append(sequence)
        self.longest = max(map(len, request.bad_token_ids), default=1)
        self.mask = self.allowed.to_bytes(self.mask_bytes, "little")
        self._grammar = grammar
        if (error := self().error()) is not None:
            raise error

    def __call__(self) -> RuledTokens:
        return RuledTokens(self, None if self._grammar is None else self._grammar())


class RuledTokens:
    """A sequence's place in its request's rules, and in its grammar; see `rayllm.core.sequence.Constraint`."""

    def __init__(self, rules: TokenRules, grammar: Constraint | None):
        self._rules, self._grammar = rules, grammar
        self._tail: list[int] = []  # the last tokens that were generated, as many as a forbidden sequence may have
        self._count = 0  # of those that were generated
        self._mask: bytes | None = None
        self._error: InvalidRequestError | None = None

    def mask(self) -> bytes | None:
        if self._mask is None and self._error is None:
            self._find()
        return self._mask

    def accept(self, *tokens: int) -> None:
        self._tail = [*self._tail, *tokens][-self._rules.longest :]
        self._count += len(tokens)
        self._mask = None
        if self._grammar is not None:
            self._grammar.accept(*tokens)

    def error(self) -> InvalidRequestError | None:
        if self._grammar is not None and (error := self._grammar.error()) is not None:
            return error
        self.mask()
        return self._error

    def _find(self) -> None:
        """Find the mask, unless the grammar's is still to come."""
        rules, is_early = self._rules, self._count < self._rules.min_tokens
        last = self._tail[-1:]
        sequences = rules.forbidden.get(last[0], ()) if last else ()
        forbidden = {each[-1] for each in sequences if self._tail[1 - len(each) :] == each[:-1]}
        if self._grammar is None and not forbidden and not is_early and rules.allowed:
            self._mask = rules.mask
            return
        allowed = rules.allowed_early if is_early else rules.allowed
        if self._grammar is not None:
            if (mask := self._grammar.mask()) is None:
                return
            allowed &= int.from_bytes(mask, "little")
        allowed &= ~_bits(forbidden, rules.mask_bytes)
        if allowed:
            self._mask = allowed.to_bytes(rules.mask_bytes, "little")
        else:
            message = f"{rules.param}: no token is left that may come next"
            self._error = InvalidRequestError(message, rules.param)


def _bits(ids: Iterable[int], num_bytes: int) -> int:
    """A number whose bits of these places are set."""
    bits = bytearray(num_bytes)
    for token in ids:
        bits[token >> 3] |= 1 << (token & 7)
    return int.from_bytes(bits, "little")
