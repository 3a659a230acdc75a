"""Blocks and prefix cache alone, under random histories of everything a scheduler may do with them."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rayllm.core.blocks import BlockManager
from rayllm.core.prefix_cache import PrefixCache

SIZE, NUM_BLOCKS = 4, 12


class Blocks(RuleBasedStateMachine):
    """Tables with the token ids that their blocks hold; `contents` is what a worker would have written."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(NUM_BLOCKS, SIZE)
        self.cache = self.manager.cache
        self.root = self.cache.root("")
        self.tables: list[tuple[list[int], list[int]]] = []  # (block table, token ids of its full blocks)
        self.contents: dict[int, tuple[int, ...]] = {}

    @rule(ids=st.lists(st.integers(0, 2), min_size=1, max_size=16))
    def admit(self, ids: list[int]) -> None:
        """Match a prompt, allocate the rest, write and register its full blocks."""
        hashes: list[bytes] = []
        self.cache.extend(hashes, self.root, ids, len(ids) // SIZE)
        cached = self.cache.match(hashes)
        for i, block in enumerate(cached):
            assert self.contents[block] == tuple(ids[: (i + 1) * SIZE]), "a hit on another content"
        missing = self.manager.blocks_for(len(ids)) - len(cached)
        if self.manager.num_free_after(cached) < missing:
            return
        free = self.manager.num_free_after(cached)
        self.manager.acquire(cached)
        assert self.manager.num_free == free
        table = cached + self.manager.allocate(missing)
        for i in range(len(cached), len(ids) // SIZE):
            self.contents[table[i]] = tuple(ids[: (i + 1) * SIZE])
            self.cache.register(hashes[i], table[i])
        if len(ids) % SIZE:
            self.contents[table[-1]] = ()
        self.tables.append((table, ids))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table, _ids = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.manager.release(table, stale=data.draw(st.booleans()))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        table, ids = data.draw(st.sampled_from(self.tables))
        self.tables.append((self.manager.fork(table), ids))

    @precondition(lambda self: self.tables and self.manager.num_free)
    @rule(data=st.data())
    def write_the_last_block(self, data: st.DataObject) -> None:
        """Only a block of one's own that is not cached may be written in place."""
        table, _ids = data.draw(st.sampled_from(self.tables))
        last = len(table) - 1
        others = sum(table[last] in other for other, _ in self.tables) - 1
        needed = self.manager.needs_copy(table[last])
        assert needed == (others > 0 or table[last] in self.cache)
        copy = self.manager.make_writable(table, last)
        assert (copy is not None) == needed
        if copy is not None:
            source, destination = copy
            assert table[last] == destination != source
            self.contents[destination] = ()
            self.manager.release([source])

    @invariant()
    def records_agree(self) -> None:
        self.manager.check_integrity([table for table, _ in self.tables])
        assert self.manager.num_free == NUM_BLOCKS - len({block for table, _ in self.tables for block in table})


Blocks.TestCase.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
test_random_histories = Blocks.TestCase


def test_the_least_recently_used_cached_block_is_reused_first_and_empty_ones_before_it():
    manager = BlockManager(3, SIZE)
    cache = manager.cache
    hashes: list[bytes] = []
    cache.extend(hashes, cache.root(""), list(range(8)), 2)
    first, second, third = manager.allocate(3)
    cache.register(hashes[0], first)
    cache.register(hashes[1], second)
    manager.release([first])
    manager.release([second])
    manager.release([third])  # empty
    assert manager.allocate(1) == [third]
    assert cache.match(hashes) == [first, second]
    assert manager.allocate(1) == [first]
    assert cache.match(hashes) == []


def test_hashes_depend_on_salt_secret_and_everything_before():
    cache = PrefixCache(SIZE, secret=b"a")

    def chain(ids: list[int], salt: str = "", owner: PrefixCache = cache) -> list[bytes]:
        hashes: list[bytes] = []
        owner.extend(hashes, owner.root(salt), ids, len(ids) // SIZE)
        return hashes

    base = chain([1, 2, 3, 4, 5, 6, 7, 8])
    assert base == chain([1, 2, 3, 4, 5, 6, 7, 8])
    assert base[1] != chain([9, 2, 3, 4, 5, 6, 7, 8])[1]
    assert base[0] != chain([1, 2, 3, 4], salt="tenant")[0]
    assert base[0] != chain([1, 2, 3, 4], owner=PrefixCache(SIZE, secret=b"b"))[0]


def test_misuse_is_an_error():
    manager = BlockManager(2, SIZE)
    table = manager.allocate(2)
    with pytest.raises(RuntimeError, match="1 blocks asked for, 0 free"):
        manager.allocate(1)
    manager.release(table)
    with pytest.raises(RuntimeError, match="nobody holds it"):
        manager.release(table)


def test_evictions_are_reported_and_a_touched_block_is_evicted_last():
    evicted = []
    manager = BlockManager(3, SIZE, lambda *block: evicted.append(block))
    cache = manager.cache
    hashes: list[bytes] = []
    cache.extend(hashes, cache.root(""), list(range(8)), 2)
    first, second, third = manager.allocate(3)
    cache.register(hashes[0], first)
    cache.register(hashes[1], second)
    for block in (first, second, third):
        manager.release([block])
    manager.touch(first)
    assert manager.allocate(2) == [third, second]
    assert evicted == [(second, hashes[1], True)]
    manager.touch(second)  # held: nothing happens
    manager.acquire([first])
    assert manager.num_holders(first) == 1
    manager.fork([first])
    assert manager.num_holders(first) == 2


def test_stale_blocks_are_reused_before_other_cached_ones_and_behind_empty_ones():
    evicted = []
    manager = BlockManager(5, SIZE, lambda *block: evicted.append(block))
    cache = manager.cache
    hashes: list[bytes] = []
    cache.extend(hashes, cache.root(""), list(range(16)), 4)
    blocks = manager.allocate(5)
    for digest, block in zip(hashes, blocks, strict=False):
        cache.register(digest, block)
    kept, stale, used, touched, empty = blocks
    manager.release([kept])
    for block in (stale, used, touched):
        manager.release([block], stale=True)
    manager.release([empty], stale=True)
    manager.touch(touched)
    manager.acquire([used])
    manager.release([used])  # used again: as good as any
    assert manager.num_free == 5
    assert manager.allocate(5) == [empty, stale, kept, touched, used]
    assert [(block, worth) for block, _hash, worth in evicted] == [
        (stale, False),
        (kept, True),
        (touched, True),
        (used, True),
    ]
    manager.check_integrity([blocks])
