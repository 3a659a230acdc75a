"""A step on the driver's side: `Draft`, a plan in the making; `InFlight`, what is kept until its result comes."""

from __future__ import annotations

from dataclasses import dataclass, field

from rayllm.api.types import SequenceData, StepPlan
from rayllm.core.chunk_budget import Pace
from rayllm.core.kv_memory import Moves
from rayllm.core.sequence import Sequence, SequenceGroup
from rayllm.core.step_time import StepWork


@dataclass(slots=True)
class InFlight:
    """sampled: the sequences that sample. pooled: those whose embeddings come. Both are in the plan's order.

    by_row: the prefills, for prompt logprobs. work, scheduled_at: what it computes, and the clock then; work is None if
    nobody wants to know how long steps take.
    """

    step_id: int
    sampled: list[Sequence]
    pooled: list[Sequence]
    by_row: dict[int, Sequence]
    work: StepWork | None = None
    scheduled_at: float = 0.0


@dataclass(slots=True)
class Draft:
    """budget: tokens that may still be scheduled. decodes, ending, partial: as StepPlan orders them, with token counts.

    pooled: those of `partial` that end in this step, with an embedding instead of a sampled token.
    copied: sources of copies, held until the plan is complete. forked: siblings that enter in the next step.
    masks: of the constrained sequences that sample. arriving: sequences that entered, but whose blocks are filled while
    the step computes. await_swap_ins: this step's rows read those blocks all the same. started: requests admitted for
    the first time. pace: how long the chunks of prompts may take; None as long as they like.
    """

    budget: int
    decodes: list[Sequence] = field(default_factory=list)
    ending: list[tuple[Sequence, int]] = field(default_factory=list)
    partial: list[tuple[Sequence, int]] = field(default_factory=list)
    pooled: list[Sequence] = field(default_factory=list)
    new: list[SequenceData] = field(default_factory=list)
    block_updates: list[tuple[int, int, list[int]]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    copied: list[int] = field(default_factory=list)
    forked: list[Sequence] = field(default_factory=list)
    masks: list[tuple[Sequence, bytes]] = field(default_factory=list)
    arriving: list[Sequence] = field(default_factory=list)
    await_swap_ins: bool = False
    started: list[SequenceGroup] = field(default_factory=list)
    pace: Pace | None = None

    @property
    def is_empty(self) -> bool:
        """True while nothing is to be computed."""
        return not (self.decodes or self.ending or self.partial)

    @property
    def num_tokens(self) -> int:
        """What is to be computed."""
        return len(self.decodes) + sum(count for _seq, count in self.ending + self.partial)

    def constrain(self, seq: Sequence) -> None:
        """Note that a constrained sequence samples in this step, and block it until that token is known."""
        assert seq.constraint is not None
        mask = seq.constraint.mask()
        assert mask is not None and not seq.blocked, f"sampled without a mask: {seq}"
        self.masks.append((seq, mask))
        seq.blocked = True

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
            write_backs=moves.write_backs,
            await_write_backs=moves.await_write_backs,
            await_swap_ins=self.await_swap_ins,
            tokens=tokens,
        )
        return plan, InFlight(step_id, sampled, self.pooled, {seq.row: seq for seq, _count in prefills})
