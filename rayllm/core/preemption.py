"""`preempt_last`: who gives up the device's blocks when they run out, and whether the host keeps what was in them.

The victim is always the last sequence in policy order, so the first makes progress whatever happens. What becomes of
its KV depends on the mode: "recompute" forgets it, "swap" moves it to the host pool, and "cost" does what takes less
time, by the costs that the workers measured: computing again what the prefix cache will not find, or two transfers.
A victim for which the host pool has no room is recomputed in every mode.
"""

from __future__ import annotations

from typing import Literal

from rayllm.core.sequence import Sequence
from rayllm.core.state import SchedulerState

PreemptionMode = Literal["cost", "recompute", "swap"]


class Preemption:
    """Makes room on the device. Without a host pool every victim is recomputed."""

    def __init__(self, state: SchedulerState, mode: PreemptionMode):
        if mode == "swap" and not state.memory.cpu.num_blocks:
            raise ValueError('preemption_mode "swap" needs a host pool of at least one block')
        self._state = state
        self._mode = mode if state.memory.cpu.num_blocks else "recompute"

    def preempt_last(self) -> Sequence:
        """Take the last sequence in policy order out of the batch and let it wait."""
        state = self._state
        victim = state.batch.pop_last()
        victim.group.num_preemptions += 1
        state.counters.preemptions += 1
        state.memory.drop_behind(victim)
        if self._swaps(victim):
            state.counters.swap_preemptions += 1
            state.memory.pin(victim)
        state.send_back(victim)
        return victim

    def _swaps(self, victim: Sequence) -> bool:
        memory = self._state.memory
        if self._mode == "recompute" or not memory.looks_up(victim):
            return False
        num_out = memory.num_to_move(victim)
        if num_out is None:
            return False
        if self._mode == "swap":
            return True
        # Out goes what the host has not got yet, in comes what the device will not have any more, and the tokens of the
        # last, partial block are computed again. Recomputing starts behind what others keep in the prefix cache.
        size, costs = memory.block_size, memory.costs
        kept, full = memory.num_kept(victim), victim.num_computed // size
        swap = costs.swap_out(num_out) + costs.swap_in(full - max(victim.first_block, kept))
        return swap + costs.recompute(victim.num_computed - full * size) < costs.recompute(
            victim.num_computed - kept * size
        )
