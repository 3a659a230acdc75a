"""`Sequence` and `SequenceGroup`: what the driver knows of a request while it lives."""

from __future__ import annotations

import enum
import hashlib
import sys
from dataclasses import dataclass, field

from rayllm.api.sampling_params import MAX_SEED, SamplingParams
from rayllm.api.types import GenerationRequest, Pooling, TokenLogprobs
from rayllm.core.beam_search import Beam, BeamSearch
from rayllm.core.constraint import Constraint, MakeConstraint

NEVER = sys.maxsize


class SequenceStatus(enum.Enum):
    """Where a sequence is. FORKED: holds its parent's blocks and waits for the next step to enter the batch.

    SWAPPED: preempted, with its KV in the host pool.
    """

    WAITING = enum.auto()
    FORKED = enum.auto()
    RUNNING = enum.auto()
    SWAPPED = enum.auto()
    FINISHED = enum.auto()


class Sequence:
    """One completion: its tokens, its blocks and how far it has been computed.

    token_ids: tokens whose ids are known, prompt first. num_pending: tokens sampled by steps in flight, whose
    ids are not known yet; they count as part of the sequence. A pooled prompt's embedding counts as such a token, which
    is the sequence's last. num_computed: leading tokens whose KV is written once all
    submitted steps have run. decoding: all tokens but the last (known or pending) are computed.
    block_table: of the blocks from first_block on; those before it lie behind the sliding window and were let go.
    num_shared: leading blocks of block_table that others held when it was made.
    expected_len: tokens that it is expected to have in the end, as last forecast; 0 before. length_share: where
    among possible lengths that is, in [0, 1); 0 before.
    capacity: tokens up to which block_table reaches. max_len: tokens after which it ends.
    next_full: when the known tokens exceed this number, another block is full and enters the prefix cache.
    steady_computed: while fewer tokens are computed, the next decode needs no look at the sequence. steady_known: while
    no more are known, a token that does not stop it only has to be appended. Neither ever allows too much.
    row: its place in the workers' persistent batch while it runs.
    cpu_table: while it is swapped out, the host blocks that hold the KV of its first num_swapped tokens, from the
    first block on that it still needs.
    constraint: which tokens it may take; None for any.
    beam: what it is to its group's beam search; None without one.
    blocked: constrained, and the mask of its next token is not known, because the token before it is in flight or the
    constraint still computes; or a beam whose next token is in flight or not chosen yet, so that it is pending. Until
    that is known, no step may sample for the sequence.
    """

    __slots__ = (
        "beam",
        "block_hashes",
        "block_table",
        "blocked",
        "capacity",
        "constraint",
        "cpu_table",
        "decoding",
        "expected_len",
        "first_block",
        "fresh",
        "group",
        "index",
        "key",
        "length_share",
        "max_len",
        "next_full",
        "num_computed",
        "num_pending",
        "num_registered",
        "num_shared",
        "num_swapped",
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
        self.index = index
        self.key = key
        self.max_len = max_len
        self.stop_ids = stop_ids
        self.seed = derive_seed(group.seed, index)
        self.token_ids = list(group.prompt_token_ids)
        self.status = SequenceStatus.WAITING
        self.fresh = True  # nothing has been sent to the front yet
        self.row = -1
        self.num_pending = 0
        self.expected_len = 0
        self.length_share = 0.0
        self.constraint: Constraint | None = None
        self.beam: Beam | None = None
        self.blocked = False
        self.block_hashes: list[bytes] = []
        self.cpu_table: list[int] = []
        self.num_swapped = 0
        self.reset()

    def reset(self) -> None:
        """Forget the KV on the device. What the host holds of it stays."""
        self.block_table: list[int] = []
        self.first_block = self.num_shared = 0
        self.capacity = 0
        self.decoding = False
        self.num_computed = 0
        self.num_registered = 0
        self.next_full = NEVER
        self.steady_computed = self.steady_known = 0

    @property
    def awaits_choice(self) -> bool:
        """True for a beam that has found its best continuations. Its step is over, so it is in no queue meanwhile."""
        return self.beam is not None and self.beam.found is not None

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
    """One request: sequences that share a prompt, of samples or beams.

    sequences: all samples, or the beams that live, best first. search: the beam search, if it is one.
    siblings: those not forked off the first sequence yet. num_cached_tokens: prompt tokens found in the prefix
    cache when the request was first admitted; None before. num_preemptions: of all its sequences so far.
    added_at, started_at: the scheduler's clock when the request came and when it was first admitted.
    report_start: the front wants to know the latter at once. pooling: the prompt is embedded, not continued.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    root_hash: bytes
    sequences: list[Sequence] = field(default_factory=list)
    siblings: list[Sequence] = field(default_factory=list)
    num_cached_tokens: int | None = None
    num_preemptions: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    added_at: float = 0.0
    started_at: float = 0.0
    report_start: bool = False
    pooling: Pooling | None = None
    search: BeamSearch | None = None

    @classmethod
    def of(
        cls,
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

        order: the policy's, unique to the request. constrain: makes each sequence's constraint, whose first mask is
        known.
        """
        params, prompt = request.params, list(request.prompt_token_ids)
        group = cls(
            request.request_id,
            prompt,
            params,
            seed,
            root_hash,
            report_start=request.report_start,
            pooling=request.pooling,
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
            group.search = BeamSearch(params, len(prompt), limit)
            group.sequences[0].beam = Beam()
        if constrain is not None:
            for seq in group.sequences:
                seq.constraint = constrain()
        return group

    @property
    def finished(self) -> bool:
        """True once every sequence of the group is."""
        return all(seq.status is SequenceStatus.FINISHED for seq in self.sequences)


def derive_seed(seed: int, index: int) -> int:
    """The seed of completion `index` of a request: the request's own for the first, an independent one for the rest."""
    if index == 0:
        return seed
    digest = hashlib.sha256(f"{seed}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") & MAX_SEED
