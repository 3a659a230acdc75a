"""`Sequence` and `SequenceGroup`: what the scheduler knows of a request while it lives.

What only grammars and beams need hangs on a sequence's `Gate`.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from rayllm.api.sampling_params import derive_seed
from rayllm.api.types import GenerationRequest, TokenLogprobs
from rayllm.errors import InvalidRequestError

NEVER = sys.maxsize


class SequenceStatus(enum.Enum):
    """Where a sequence is."""

    WAITING = enum.auto()  # outside the batch: new, preempted, or a beam whose group has not chosen yet
    FORKED = enum.auto()  # holds its parent's blocks and enters the batch in the next step
    RUNNING = enum.auto()  # has a row of the workers' persistent batch
    FINISHED = enum.auto()


# -------------------------------------------------------------------------------------------------- grammars and beams


class Constraint(Protocol):
    """Says which tokens may come next in one sequence. All calls return at once, and come from one thread.

    The mask of the next token may take a while to compute. It depends on the tokens alone, so preemption leaves a
    constraint as it is.
    """

    def mask(self) -> bytes | None:
        """Packed bits, token i allowed if bit i % 8 of byte i // 8 is set; None while the answer is not known."""

    def accept(self, *tokens: int) -> None:
        """Go on behind sampled tokens; the masks allowed them, and they did not end the sequence."""

    def error(self) -> InvalidRequestError | None:
        """Why there will be no further mask, if so: a limit was reached, or no token can follow."""


MakeConstraint = Callable[[], Constraint]


class Hypothesis(NamedTuple):
    """A finished sequence of a beam search."""

    score: float
    # Generated tokens.
    token_ids: list[int]
    # The sum of their log-probabilities.
    cumulative: float
    # The end-of-sequence or stop id, if one ended it.
    stop_id: int | None
    # As of `Beam`.
    entries: list[TokenLogprobs]


@dataclass(slots=True)
class BeamSearch:
    """A request's search; its beams are the group's sequences."""

    # The best finished sequences, best first.
    finished: list[Hypothesis] = field(default_factory=list)
    # A choice has been made.
    started: bool = False


@dataclass(slots=True)
class Beam:
    """What a sequence is to its group's beam search."""

    # The sum of the log-probabilities of its generated tokens.
    cumulative: float = 0.0
    # Those tokens' log-probabilities, if the request asks for them.
    entries: list[TokenLogprobs] = field(default_factory=list)
    # Its most likely next tokens, from the step that found them until the group's choice is made.
    found: TokenLogprobs | None = None


@dataclass(slots=True)
class Gate:
    """What a sequence has to wait for before each token it samples: it has a constraint, or it is a beam."""

    constraint: Constraint | None = None
    beam: Beam | None = None
    # True while no step may sample for the sequence: its next mask is not known because the token before it is in
    # flight or the constraint still computes, or the beam's next token is in flight or not chosen.
    closed: bool = False


# -------------------------------------------------------------------------------------------------- requests


class Sequence:
    """One completion: its tokens, its blocks and how far it has been computed.

    index: which of the request's completions. key: its place in the scheduling policy's order, unique among live
    sequences, lower first.
    """

    def __init__(self, group: SequenceGroup, index: int, key: tuple):
        self.group, self.index, self.key = group, index, key
        self.request_id, self.max_len, self.stop_ids = group.request.request_id, group.max_len, group.stop_ids
        self.seed = derive_seed(group.request.noise_seed, index)  # of its sampling noise
        self.token_ids = list(group.request.prompt_token_ids)  # tokens whose ids are known, prompt first
        self.status = SequenceStatus.WAITING
        self.gate: Gate | None = None
        # Tokens sampled by steps in flight, whose ids are not known yet; they count as part of the sequence. A pooled
        # prompt's embedding counts as such a token, which is the sequence's last.
        self.num_pending = 0
        self.row = -1  # in the workers' persistent batch, while it runs
        self.adapter_slot = -1  # where its adapter is on the device, while it runs
        self.block_hashes: list[bytes] = []  # chained hashes of its leading full blocks, as far as computed
        self.pinned: list[int] = []  # host blocks held for it while it is swapped out
        self.reset()

    def reset(self) -> None:
        """Forget the KV on the device. What the host holds of it stays."""
        # By group, unless it has none: device blocks in order, and the number of the first of them. Blocks before that
        # lie behind the group's window and were let go.
        self.block_tables: list[list[int]] = []
        self.first_blocks: list[int] = []
        # Leading blocks that were found when it entered, and that were in all groups without a window.
        self.num_matched = self.parting = 0
        self.capacity = 0  # tokens up to which all its tables reach
        self.num_computed = 0  # leading tokens whose KV is written once all submitted steps have run
        self.num_registered = 0  # leading full blocks that the prefix cache was told of
        self.decoding = False  # all tokens but the last (known or pending) are computed
        self.next_full = NEVER  # with more known tokens than this, another block is full and enters the prefix cache
        # Below these, a step need not look at the sequence closely: while fewer tokens are computed the next decode
        # needs no block and cannot be the last, and while no more are known a token that is no stop is only appended.
        self.steady_computed = 0
        self.steady_known = 0

    @property
    def awaits_choice(self) -> bool:
        """True for a beam that has found its next tokens: nothing is left to compute until its group chooses."""
        return self.gate is not None and self.gate.beam is not None and self.gate.beam.found is not None

    @property
    def closed(self) -> bool:
        """True while no step may sample for it."""
        return self.gate is not None and self.gate.closed

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id}/{self.index} {self.status.name} row={self.row} known={len(self.token_ids)} "
            f"pending={self.num_pending} computed={self.num_computed} blocks={self.block_tables})"
        )


@dataclass(slots=True)
class SequenceGroup:
    """One request: sequences that share a prompt, as samples or as beams."""

    request: GenerationRequest
    # Where the hash chain of its blocks starts; equal prompts share blocks only from equal roots.
    root_hash: bytes
    # Tokens after which its sequences end, and tokens that end them.
    max_len: int
    stop_ids: frozenset[int] = frozenset()
    # All samples but those that the front ended, or the beams that live, best first; none once all have ended, as they
    # refer to this, and a request's memory is not to wait for the garbage collector.
    sequences: list[Sequence] = field(default_factory=list)
    # Those of them that have not been forked off the first sequence yet.
    siblings: list[Sequence] = field(default_factory=list)
    # Prompt tokens found in the prefix cache when the request was first admitted; None before.
    num_cached_tokens: int | None = None
    # Of all its sequences so far.
    num_preemptions: int = 0
    # How often it began anew because workers were lost.
    num_recoveries: int = 0
    # No tokens have been sent to the front yet.
    fresh: bool = True
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    # The beam search, if it is one.
    search: BeamSearch | None = None
    # The id of the adapter that it has; None for none.
    adapter: int | None = None
    # The scheduler's clock when the request came, and when it was first admitted.
    added_at: float = 0.0
    started_at: float = 0.0

    @property
    def finished(self) -> bool:
        """True once every sequence of the group is."""
        return all(seq.status is SequenceStatus.FINISHED for seq in self.sequences)


def policy_order(seq: Sequence) -> tuple:
    """Sort key: the scheduling policy's order, unique among live sequences."""
    return seq.key
