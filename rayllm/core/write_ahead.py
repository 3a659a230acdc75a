"""`WriteAhead`: cached device blocks are copied to the host before they are reused for something else.

A block that is demoted only when it is reused holds up the step that reuses it, because its content has to be out of
the way first. So the blocks that will be reused next are copied beside the steps before: a transfer that nothing waits
for, unless the blocks are needed sooner than they are gone.
"""

from __future__ import annotations

from rayllm.core.block_manager import BlockManager
from rayllm.core.prefix_cache import PrefixCache

LEAST_BLOCKS = 32  # a step may copy, whatever it computes; a long step may copy twice as many as its tokens fill
HOST_SHARE = 4  # no more than this part of the host pool may hold what the device still has


class WriteAhead:
    """gpu, cpu, and the prefix cache over each. reach: how far ahead in the order of reuse, in blocks."""

    def __init__(
        self, gpu: BlockManager, cache: PrefixCache, cpu: BlockManager, cpu_cache: PrefixCache, reach: int
    ):  # fmt: skip
        self._gpu, self._cache, self._cpu, self._cpu_cache = gpu, cache, cpu, cpu_cache
        self._reach = min(reach, cpu.num_blocks // HOST_SHARE)
        self._next: list[int] = []  # device blocks to copy, the last first
        self._allocated = 0  # gpu.num_allocated when that was looked up
        self._steps: dict[int, int] = {}  # device block -> the step that its last copy started with

    def choose(self, step_id: int, num_tokens: int, room: int) -> list[tuple[int, int]]:
        """(device block, host block) to copy beside a step of num_tokens tokens, which has taken all blocks it needs.

        room: free host blocks to choose from. The host blocks are free too, and findable by what they will hold.
        """
        if self._gpu.num_allocated - self._allocated >= LEAST_BLOCKS:
            self._allocated = self._gpu.num_allocated
            self._next = [block for block in self._gpu.next_reused(self._reach) if self._digest(block) is not None]
            self._next.reverse()
        most = min(room, LEAST_BLOCKS + 2 * num_tokens // self._gpu.block_size)
        pairs: list[tuple[int, int]] = []
        while self._next and len(pairs) < most:
            block = self._next.pop()
            digest = self._digest(block)
            if digest is None:
                continue  # used, reused or copied since
            (host_block,) = self._cpu.allocate(1)
            self._cpu_cache.register(digest, host_block)
            self._cpu.release([host_block])
            self._steps[block] = step_id
            pairs.append((block, host_block))
        return pairs

    def reuse(self, block: int) -> int:
        """The step with which the copy of a block that is about to be reused started; -1 if there is none."""
        return self._steps.pop(block, -1)

    def _digest(self, block: int) -> bytes | None:
        """What a block holds; None unless it should be copied."""
        digest = None if self._gpu.is_held(block) else self._cache.digest_of(block)
        return None if digest is None or self._cpu_cache.find(digest) is not None else digest
