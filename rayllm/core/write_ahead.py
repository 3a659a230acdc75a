"""`WriteAhead`: cached device blocks are copied to the host before they are reused for something else.

A block that is demoted only when it is reused holds up the step that reuses it, because its content has to be out of
the way first. So the blocks that will be reused next are copied beside the steps before: a transfer that nothing waits
for, unless the blocks are needed sooner than they are gone.
"""

from __future__ import annotations

from rayllm.core.block_manager import BlockManager
from rayllm.core.prefix_cache import PrefixCache

LEAST_BLOCKS = 32  # a step may copy, whatever it computes; a long step may copy twice as many as its tokens fill
LOOKS = 8  # at what comes next, while as many blocks as are looked at are allocated: each look is a walk over them all
HOST_SHARE = 4  # no more than this part of the host pool may hold what the device still has


class WriteAhead:
    """gpu, cpu, and the prefix cache over each. reach: how far ahead in the order of reuse, in blocks."""

    def __init__(self, gpu: BlockManager, cache: PrefixCache, cpu: BlockManager, cpu_cache: PrefixCache, reach: int):
        self._gpu, self._cache, self._cpu, self._cpu_cache = gpu, cache, cpu, cpu_cache
        self._reach = min(reach, cpu.num_blocks // HOST_SHARE)
        self._next: list[int] = []  # device blocks that may have to be copied, the last first
        self._allocated = 0  # gpu.num_allocated when that was looked up
        self._steps: dict[int, int] = {}  # cached device block with a copy -> the step it started with, -1 for long ago

    def choose(self, step_id: int, num_tokens: int, room: int) -> list[tuple[int, int]]:
        """(device block, host block) to copy beside a step of num_tokens tokens, which has taken all blocks it needs.

        room: free host blocks to choose from. The host blocks are free too, and findable by what they will hold.
        """
        if self._gpu.num_allocated - self._allocated >= max(LEAST_BLOCKS, self._reach // LOOKS):
            self._allocated = self._gpu.num_allocated
            self._next = [block for block in self._gpu.next_reused(self._reach) if block not in self._steps]
            self._next.reverse()
        most = min(room, LEAST_BLOCKS + 2 * num_tokens // self._gpu.block_size)
        pairs: list[tuple[int, int]] = []
        while self._next and len(pairs) < most:
            block = self._next.pop()
            digest = self._cache.digest_of(block)
            if digest is None or self._gpu.is_held(block):
                continue  # empty, or in use again
            if self._cpu_cache.find(digest) is not None:
                self._steps.setdefault(block, -1)
                continue
            (host_block,) = self._cpu.allocate(1)
            self._cpu_cache.register(digest, host_block)
            self._cpu.release([host_block])
            self._steps[block] = step_id
            pairs.append((block, host_block))
        return pairs

    def reuse(self, block: int) -> int:
        """The step that the copy of a block started with that is about to be reused; -1 if none is to be waited for."""
        return self._steps.pop(block, -1)
