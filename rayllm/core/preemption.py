"""`Preemption`: who gives up the device's blocks when they run out, and whether the host keeps what was in them.

The victim is always the last sequence in policy order, so the first makes progress whatever happens. What becomes of
its KV depends on the mode: "recompute" forgets it, "swap" moves it to the host pool, and "cost" does what takes less
time, by the costs that the workers measured: computing again what the prefix cache will not find, or two transfers.
A victim for which the host pool has no room is recomputed in every mode.
"""

from __future__ import annotations

from rayllm.api.types import KVCosts
from rayllm.core.batch import RunningBatch
from rayllm.core.kv_memory import KVMemory
from rayllm.core.queue import WaitingQueue
from rayllm.core.sequence import Sequence, SequenceStatus

MODES = ("cost", "recompute", "swap")


class Preemption:
    """waiting, swapped: where victims go. costs: needed by mode "cost" if there is a host pool.

    num_preemptions: sequences preempted so far; num_swaps: those of them by swap.
    """

    def __init__(
        self,
        mode: str,
        memory: KVMemory,
        batch: RunningBatch,
        waiting: WaitingQueue,
        swapped: WaitingQueue,
        costs: KVCosts | None,
    ):
        if mode not in MODES:
            raise ValueError(f"preemption_mode must be one of {', '.join(MODES)}, not {mode!r}")
        if mode == "swap" and not memory.cpu.num_blocks:
            raise ValueError('preemption_mode "swap" needs a host pool of at least one block')
        self._mode = mode if memory.cpu.num_blocks else "recompute"
        if self._mode == "cost" and costs is None:
            raise ValueError('preemption_mode "cost" needs the measured costs')
        self._memory, self._batch, self._waiting, self._swapped = memory, batch, waiting, swapped
        self._costs = costs
        self.num_preemptions = self.num_swaps = 0

    def preempt_last(self) -> Sequence:
        """Take the last sequence in policy order out of the batch."""
        victim = self._batch.pop_last()
        victim.group.num_preemptions += 1
        self._memory.drop_behind(victim)
        self.num_preemptions += 1
        if self._swaps(victim):
            self.num_swaps += 1
            self._memory.swap_out(victim)
            self._memory.gpu.release(victim.block_table)
            victim.reset()
            victim.status = SequenceStatus.SWAPPED
            if not victim.awaits_choice:
                self._swapped.push(victim)
        else:
            self.send_back(victim)
        return victim

    def send_back(self, seq: Sequence) -> None:
        """Free a sequence's blocks and let it wait, to be computed again from its first token."""
        self._memory.gpu.release(seq.block_table)
        seq.reset()
        seq.status = SequenceStatus.WAITING
        if not seq.awaits_choice:
            self._waiting.push(seq)

    def _swaps(self, victim: Sequence) -> bool:
        if self._mode == "recompute" or victim.group.pooling == "mean":
            return False  # the workers' sum of hidden states goes with the row
        num_out = self._memory.swap_out_needs(victim)
        if num_out is None:
            return False
        return self._mode == "swap" or self._swap_seconds(victim, num_out) < self._recompute_seconds(victim)

    def _swap_seconds(self, victim: Sequence, num_out: int) -> float:
        """Out what the host has not got yet, in what the device will not have any more."""
        assert self._costs is not None
        begin = max(victim.first_block, self._memory.num_kept(victim))
        num_in = self._memory.gpu.blocks_for(victim.num_computed) - begin
        return self._costs.swap_out(num_out) + self._costs.swap_in(num_in)

    def _recompute_seconds(self, victim: Sequence) -> float:
        """For the tokens whose blocks nobody else keeps in the prefix cache."""
        assert self._costs is not None
        kept = self._memory.num_kept(victim) * self._memory.block_size
        return self._costs.recompute(victim.num_computed - kept)
