"""`BlockManager`: who holds which block of one pool, on the device or on the host.

A block is free (no holder) or held, with a count of holders. Free blocks wait in LRU order, and those that still hold
cached content stay findable through the prefix cache until they are reused; empty ones are reused first, and then those
whose content is hardly worth it. A block is written only by its single holder and only while it is not cached:
`make_writable` copies it otherwise.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from itertools import islice

from rayllm.core.prefix_cache import PrefixCache


class BlockManager:
    """Reference-counted blocks with fork and copy-on-write. Every operation is O(1) a block.

    cache: what the blocks hold that others may use. num_allocated: blocks handed out so far.
    on_evict: called when a cached block is about to be reused, before anything else happens to it, with the block, the
    hash of its content and whether that is worth keeping elsewhere.
    """

    def __init__(self, num_blocks: int, block_size: int, on_evict: Callable[[int, bytes, bool], None] | None = None):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.cache = PrefixCache(block_size)
        self._on_evict = on_evict
        self.num_allocated = 0
        self.clear()

    def clear(self) -> None:
        """Forget all holders and contents."""
        self.cache.clear()
        self._holders = [0] * self.num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(self.num_blocks))
        self._stale: OrderedDict[int, None] = OrderedDict()  # free too, and cached, but reused before other such blocks

    @property
    def num_free(self) -> int:
        """Blocks without a holder, cached or not."""
        return len(self._free) + len(self._stale)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold num_tokens tokens."""
        return -(-num_tokens // self.block_size)

    def num_free_after(self, claimed: list[int]) -> int:
        """How many blocks would be free if the blocks `claimed` (a prefix match) were acquired."""
        return self.num_free - sum(1 for block in claimed if self._holders[block] == 0)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, least recently used first; their cached contents are forgotten.

        Raises RuntimeError if there are fewer: callers check num_free before.
        """
        free, stale = self._free, self._stale
        if count > len(free) + len(stale):
            raise RuntimeError(f"{count} blocks asked for, {self.num_free} free")
        self.num_allocated += count
        blocks = []
        for _ in range(count):
            source = free
            if stale and (not free or next(iter(free)) in self.cache):
                source = stale
            block, _none = source.popitem(last=False)
            digest = self.cache.evict(block)
            if digest is not None and self._on_evict is not None:
                self._on_evict(block, digest, source is free)
            self._holders[block] = 1
            blocks.append(block)
        return blocks

    def acquire(self, blocks: Iterable[int]) -> None:
        """Become one more holder of blocks, held or free (a prefix match)."""
        for block in blocks:
            count = self._holders[block]
            if count == 0:
                del (self._stale if block in self._stale else self._free)[block]
            self._holders[block] = count + 1

    def release(self, blocks: list[int], *, stale: bool = False) -> None:
        """Give up one hold on each block. A table's later blocks are reused before its earlier, more shared ones.

        stale: what they hold is of little use without what other blocks held, so they are reused before others.
        """
        for block in reversed(blocks):
            count = self._holders[block]
            if count <= 0:
                raise RuntimeError(f"block {block} is released but nobody holds it")
            self._holders[block] = count - 1
            if count == 1:
                if block not in self.cache:
                    self._free[block] = None
                    self._free.move_to_end(block, last=False)
                elif stale:
                    self._stale[block] = None
                else:
                    self._free[block] = None

    def touch(self, block: int) -> None:
        """Make a free block the last to be reused; no-op for a held one."""
        if self._holders[block] == 0:
            self._stale.pop(block, None)
            self._free[block] = None
            self._free.move_to_end(block)

    def next_reused(self, count: int) -> list[int]:
        """The free blocks that `allocate` takes next, in order and without stale ones, as far as there are so many."""
        return list(islice(self._free, count))

    def num_holders(self, block: int) -> int:
        """How many hold a block."""
        return self._holders[block]

    def fork(self, block_table: list[int]) -> list[int]:
        """A second table over the same blocks."""
        self.acquire(block_table)
        return list(block_table)

    def needs_copy(self, block: int) -> bool:
        """True if a holder that wants to write `block` must copy it first."""
        return self._holders[block] > 1 or block in self.cache

    def make_writable(self, block_table: list[int], index: int) -> tuple[int, int] | None:
        """Copy-on-write: replace block_table[index] by a block of its own if it is shared or cached.

        Returns (source, destination) for the workers to copy, or None if the block may be written as it is. The
        caller keeps its hold on the source and releases it once the step's plan is complete: released earlier, the
        source could become another copy's destination in the same step, and copies run in parallel.
        """
        source = block_table[index]
        if not self.needs_copy(source):
            return None
        (destination,) = self.allocate(1)
        block_table[index] = destination
        return source, destination

    def check_integrity(self, tables: Iterable[list[int]]) -> None:
        """Raise AssertionError unless the counts are exactly those of `tables`, all the tables there are."""
        held: Counter[int] = Counter()
        for table in tables:
            assert len(set(table)) == len(table), f"a table holds a block twice: {table}"
            held.update(table)
        for block in range(self.num_blocks):
            assert self._holders[block] == held[block], (
                f"block {block} has {self._holders[block]} holders on record, {held[block]} in tables"
            )
            lists = (block in self._free) + (block in self._stale)
            assert lists == (held[block] == 0), f"block {block} is in the wrong list"
            assert block not in self._stale or block in self.cache, f"block {block} is empty, but not reused first"
        self.cache.check_integrity()
