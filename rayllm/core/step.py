"""A step on the driver's side: `Draft`, a plan in the making; `InFlight`, what is kept until its result comes."""

from __future__ import annotations

from dataclasses import dataclass, field

from rayllm.api.types import SequenceData, StepPlan
from rayllm.core.chunk_budget import StepChunks
from rayllm.core.memory import Moves
from rayllm.core.sequence import Sequence, SequenceGroup
from rayllm.core.step_time import StepWork


@dataclass(slots=True)
class InFlight:
    """A plan whose result is not there yet."""

    step_id: int
    # The sequences that sample, and those whose embeddings come, each in the plan's order.
    sampled: list[Sequence]
    pooled: list[Sequence]
    # Sequences that compute parts of their prompts, by row, for prompt logprobs.
    by_row: dict[int, Sequence]
    # What the step computes, and the clock when it was scheduled; None if nobody wants to know how long steps take.
    work: StepWork | None = None
    scheduled_at: float = 0.0


@dataclass(slots=True)
class Draft:
    """What the passes of `Scheduler.schedule` have put into the next plan so far."""

    # Tokens that may still be scheduled.
    budget: int
    # Sequences that compute one token and sample.
    decodes: list[Sequence] = field(default_factory=list)
    # Sequences whose prompt ends in this step and that sample, with token counts.
    ending: list[tuple[Sequence, int]] = field(default_factory=list)
    # Other chunks of prompts, with token counts.
    partial: list[tuple[Sequence, int]] = field(default_factory=list)
    # Those of `partial` that end in this step, with an embedding instead of a sampled token.
    pooled: list[Sequence] = field(default_factory=list)
    # As `StepPlan` has them.
    new: list[SequenceData] = field(default_factory=list)
    block_updates: list[tuple[int, int, list[int]]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    # Sources of `copies`, held until the plan is complete.
    copied: list[int] = field(default_factory=list)
    # Masks of the constrained sequences that sample.
    masks: list[tuple[Sequence, bytes]] = field(default_factory=list)
    # Siblings that enter the batch in the next step.
    forked: list[Sequence] = field(default_factory=list)
    # Sequences that entered, but whose blocks are filled while the step computes.
    arriving: list[Sequence] = field(default_factory=list)
    # Rows of this step read those blocks all the same.
    await_swap_ins: bool = False
    # Requests admitted for the first time.
    started: list[SequenceGroup] = field(default_factory=list)
    # How much of the prompts the step's decodes can bear; None for any amount.
    chunks: StepChunks | None = None

    @property
    def is_empty(self) -> bool:
        """True while nothing is to be computed."""
        return not (self.decodes or self.ending or self.partial)

    @property
    def num_tokens(self) -> int:
        """Tokens to be computed."""
        return len(self.decodes) + sum(count for _seq, count in self.ending + self.partial)

    def close_gate(self, seq: Sequence) -> None:
        """Note that a gated sequence samples in this step: its mask goes along, and its next token is awaited."""
        gate = seq.gate
        assert gate is not None and not gate.closed, f"sampled with a closed gate: {seq}"
        gate.closed = True
        if gate.constraint is not None:
            mask = gate.constraint.mask()
            assert mask is not None, f"sampled without a mask: {seq}"
            self.masks.append((seq, mask))

    def finish(
        self, step_id: int, free_rows: list[int], moves: Moves, tokens: list[tuple[int, int]]
    ) -> tuple[StepPlan, InFlight]:
        """The plan and its record. The last three arguments are as in `StepPlan`."""
        sampled = self.decodes + [seq for seq, _count in self.ending]
        prefills = self.ending + self.partial
        place = {id(seq): i for i, seq in enumerate(sampled)} if self.masks else {}
        plan = StepPlan(
            step_id=step_id,
            free_rows=free_rows,
            new=self.new,
            block_updates=self.block_updates,
            copies=self.copies,
            rows=[seq.row for seq in sampled] + [seq.row for seq, _count in self.partial],
            num_tokens=[1] * len(self.decodes) + [count for _seq, count in prefills],
            num_decodes=len(self.decodes),
            num_sampled=len(sampled),
            masks=[(place[id(seq)], mask) for seq, mask in self.masks],
            swap_outs=moves.swap_outs,
            swap_ins=moves.swap_ins,
            await_swap_ins=self.await_swap_ins,
            write_backs=moves.write_backs,
            await_write_backs=moves.await_write_backs,
            tokens=tokens,
        )
        return plan, InFlight(step_id, sampled, self.pooled, {seq.row: seq for seq, _count in prefills})
