"""`WriteAhead`: cached device blocks are copied to the host before they are reused for something else.

A block that is demoted only when it is reused holds up the step that reuses it, because its content has to be out of
the way first. So the blocks that will be reused next are copied beside the steps before: a transfer that nothing waits
for, unless the blocks are needed sooner than they are gone.
"""

from __future__ import annotations

from typing import NamedTuple

from rayllm.core.blocks import BlockManager
from rayllm.core.prefix_cache import PrefixCache


class WriteAheadLimits(NamedTuple):
    """How much is copied ahead."""

    # How far ahead in the order of reuse, in blocks.
    reach: int
    # Blocks that a step may copy whatever it computes; a long step may copy twice as many as its tokens fill on top.
    blocks_a_step: int = 32
    # At most this share of the host pool may hold what the device still has: one part in so many.
    host_share: int = 4


# The order of reuse is read anew, a walk over all that is in reach, each time this part of the reach was allocated.
READS_PER_REACH = 8


class WriteAhead:
    """Chooses what to copy beside each step. gpu, cpu: the pools; cache, cpu_cache: the prefix cache over each."""

    def __init__(
        self, gpu: BlockManager, cache: PrefixCache, cpu: BlockManager, cpu_cache: PrefixCache, limits: WriteAheadLimits
    ):
        self._gpu, self._cache, self._cpu, self._cpu_cache = gpu, cache, cpu, cpu_cache
        self._blocks_a_step = limits.blocks_a_step
        self._reach = min(limits.reach, cpu.num_blocks // limits.host_share)
        self._next: list[int] = []  # device blocks that may have to be copied, the last first
        self._allocated = 0  # gpu.num_allocated when that was read
        self._started: dict[int, int | None] = {}  # cached device block with a copy -> the step it started with

    def choose(self, step_id: int, num_tokens: int, room: int) -> list[tuple[int, int]]:
        """(device block, host block) to copy beside a step of num_tokens tokens, which has taken all blocks it needs.

        room: free host blocks to choose from. The host blocks are free too, and findable by what they will hold.
        """
        if self._gpu.num_allocated - self._allocated >= max(self._blocks_a_step, self._reach // READS_PER_REACH):
            self._allocated = self._gpu.num_allocated
            self._next = [block for block in self._gpu.next_reused(self._reach) if block not in self._started]
            self._next.reverse()
        most = min(room, self._blocks_a_step + 2 * num_tokens // self._gpu.block_size)
        pairs: list[tuple[int, int]] = []
        while self._next and len(pairs) < most:
            block = self._next.pop()
            digest = self._cache.digest_of(block)
            if digest is None or self._gpu.is_held(block):
                continue  # empty, or in use again
            if self._cpu_cache.find(digest) is not None:
                self._started.setdefault(block, None)
                continue
            (host_block,) = self._cpu.allocate(1)
            self._cpu_cache.register(digest, host_block)
            self._cpu.release([host_block])
            self._started[block] = step_id
            pairs.append((block, host_block))
        return pairs

    def reuse(self, block: int) -> int | None:
        """The step that the copy of a block started with that is about to be reused; None if there is none."""
        return self._started.pop(block, None)
