"""`Sequence` and `SequenceGroup`: what the scheduler knows of a request while it lives."""

from __future__ import annotations

import enum
import hashlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from rayllm.api.sampling_params import MAX_SEED, SamplingParams
from rayllm.api.types import GenerationRequest, Pooling, TokenLogprobs
from rayllm.core.beam_search import Beam, BeamSearch

NEVER = sys.maxsize


class SequenceStatus(enum.Enum):
    """Where a sequence is."""

    WAITING = enum.auto()  # outside the batch: new, preempted, or a beam whose group has not chosen yet
    FORKED = enum.auto()  # holds its parent's blocks and enters the batch in the next step
    RUNNING = enum.auto()  # has a row of the workers' persistent batch
    FINISHED = enum.auto()


class Constraint(Protocol):
    """Says which tokens may come next in one sequence. All calls return at once, and come from one thread.

    The mask of the next token may take a while to compute. It depends on the tokens alone, so preemption leaves a
    constraint as it is.
    """

    def mask(self) -> bytes | None:
        """Packed bits, token i allowed if bit i % 8 of byte i // 8 is set; None while the answer is not known."""

    def accept(self, token: int) -> None:
        """Go on behind a sampled token; the last mask allowed it, and it did not end the sequence."""

    def error(self) -> str | None:
        """Why there will be no further mask, if so: a limit was reached, or no token can follow."""


MakeConstraint = Callable[[], Constraint]


@dataclass(slots=True)
class Gate:
    """What a sequence has to wait for before each token it samples. Only constrained sequences and beams have one."""

    constraint: Constraint | None = None
    beam: Beam | None = None
    # True while no step may sample for the sequence: its next mask is not known because the token before it is in
    # flight or the constraint still computes, or the beam's next token is in flight or not chosen.
    closed: bool = False


class Sequence:
    """One completion: its tokens, its blocks and how far it has been computed."""

    __slots__ = (
        "block_hashes",
        "block_table",
        "capacity",
        "decoding",
        "first_block",
        "fresh",
        "gate",
        "group",
        "index",
        "key",
        "max_len",
        "next_full",
        "num_computed",
        "num_pending",
        "num_registered",
        "pinned",
        "request_id",
        "row",
        "seed",
        "status",
        "steady_computed",
        "steady_known",
        "stop_ids",
        "token_ids",
    )

    def __init__(self, group: SequenceGroup, index: int, max_len: int, stop_ids: frozenset[int], key: tuple):
        self.group = group
        self.request_id = group.request_id
        self.index = index  # which of the request's completions
        self.key = key  # place in the scheduling policy's order, unique among live sequences, lower first
        self.max_len = max_len  # tokens after which it ends
        self.stop_ids = stop_ids  # tokens that end it
        self.seed = derive_seed(group.seed, index)  # of its sampling noise
        self.token_ids = list(group.prompt_token_ids)  # tokens whose ids are known, prompt first
        self.status = SequenceStatus.WAITING
        self.fresh = True  # nothing has been sent to the front yet
        self.gate: Gate | None = None
        # Tokens sampled by steps in flight, whose ids are not known yet; they count as part of the sequence. A pooled
        # prompt's embedding counts as such a token, which is the sequence's last.
        self.num_pending = 0
        self.row = -1  # in the workers' persistent batch, while it runs
        self.block_hashes: list[bytes] = []  # chained hashes of its leading full blocks, as far as computed
        self.pinned: list[int] = []  # host blocks held for it while it is swapped out, in the order of its blocks
        self.reset()

    def reset(self) -> None:
        """Forget the KV on the device. What the host holds of it stays."""
        self.block_table: list[int] = []  # device blocks in order, from first_block on
        self.first_block = 0  # blocks before it lie behind the sliding window and were let go
        self.capacity = 0  # tokens up to which block_table reaches
        self.num_computed = 0  # leading tokens whose KV is written once all submitted steps have run
        self.num_registered = 0  # leading full blocks that the prefix cache was told of
        self.decoding = False  # all tokens but the last (known or pending) are computed
        self.next_full = NEVER  # with more known tokens than this, another block is full and enters the prefix cache
        # Below these, a step need not look at the sequence closely: while fewer tokens are computed the next decode
        # needs no block and cannot be the last, and while no more are known a token that is no stop is only appended.
        self.steady_computed = 0
        self.steady_known = 0

    def fork_from(self, parent: Sequence, block_table: list[int]) -> None:
        """Hold its parent's blocks, to enter the batch in the next step."""
        self.status = SequenceStatus.FORKED
        self.block_table = block_table
        self.first_block = parent.first_block

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
            f"pending={self.num_pending} computed={self.num_computed} blocks={self.block_table})"
        )


def policy_order(seq: Sequence) -> tuple:
    """Sort key: the scheduling policy's order, unique among live sequences."""
    return seq.key


@dataclass(slots=True)
class SequenceGroup:
    """One request: sequences that share a prompt, as samples or as beams."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    # Where the hash chain of its blocks starts; equal prompts share blocks only from equal roots.
    root_hash: bytes
    # Send a delta as soon as the request is first scheduled.
    report_start: bool = False
    # The prompt is embedded, not continued.
    pooling: Pooling | None = None
    # All samples, or the beams that live, best first.
    sequences: list[Sequence] = field(default_factory=list)
    # Those of them that have not been forked off the first sequence yet.
    siblings: list[Sequence] = field(default_factory=list)
    # Prompt tokens found in the prefix cache when the request was first admitted; None before.
    num_cached_tokens: int | None = None
    # Of all its sequences so far.
    num_preemptions: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    # The beam search, if it is one.
    search: BeamSearch | None = None
    # The scheduler's clock when the request came, and when it was first admitted.
    added_at: float = 0.0
    started_at: float = 0.0

    @property
    def finished(self) -> bool:
        """True once every sequence of the group is."""
        return all(seq.status is SequenceStatus.FINISHED for seq in self.sequences)


def make_group(
    request: GenerationRequest,
    *,
    seed: int,
    root_hash: bytes,
    max_model_len: int,
    eos_token_ids: frozenset[int],
    order: tuple,
    constrain: MakeConstraint | None = None,
) -> SequenceGroup:
    """A new request's group, all of its sequences waiting.

    order: the policy's, unique to the request. constrain: makes each sequence's constraint, whose first mask is known.
    """
    params, prompt = request.params, list(request.prompt_token_ids)
    group = SequenceGroup(
        request.request_id, prompt, params, seed, root_hash, report_start=request.report_start, pooling=request.pooling
    )
    if params.prompt_logprobs is not None:
        group.prompt_logprobs = [None] * len(prompt)
    limit = max_model_len
    if params.max_tokens is not None:
        limit = min(limit, len(prompt) + params.max_tokens)
    if request.pooling is not None:
        limit = len(prompt) + 1
    stop_ids = frozenset(params.stop_token_ids)
    if not params.ignore_eos:
        stop_ids |= eos_token_ids
    count = 1 if params.use_beam_search else params.width
    group.sequences = [Sequence(group, index, limit, stop_ids, (*order, index)) for index in range(count)]
    group.siblings = group.sequences[1:]
    if params.use_beam_search:
        group.search = BeamSearch(params, len(prompt), limit, stop_ids)
        group.sequences[0].gate = Gate(beam=Beam())
    elif constrain is not None:
        for seq in group.sequences:
            seq.gate = Gate(constraint=constrain())
    return group


def derive_seed(seed: int, index: int) -> int:
    """The seed of completion `index` of a request: the request's own for the first, an independent one for the rest."""
    if index == 0:
        return seed
    digest = hashlib.sha256(f"{seed}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") & MAX_SEED
