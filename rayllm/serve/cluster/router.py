"""Which of a model's replicas gets a prompt: the one that has most of it cached, unless that one is too busy.

A front does not see the replicas' caches. It remembers what it sent where instead: a `PrefixIndex` a replica, of hashes
of blocks of ROUTING_BLOCK tokens, as many as the replica's KV pool holds, forgotten in the order in which the
replica's own cache would (least recently used first, a prompt's end before its beginning). One map says which replicas
have a block, so a choice looks at a few replicas, however many there are.

It knows nothing of what other fronts sent, or what it sent before it was started again. So a beginning that it has not
seen goes to one of its homes: replicas that follow from the beginning alone, and from a key that all fronts share, on a
ring on which a replica that comes or goes moves only its own part (consistent hashing, Karger et al. 1997). A request
may bring a key that stands for its beginning there. A wrong guess costs a prefill, never a wrong answer.

Pure Python without a clock or Ray; `front.py` feeds it.
"""

from __future__ import annotations

import random
from array import array
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import sha256
from typing import NamedTuple

from rayllm.api.types import Load

ROUTING_BLOCK = 32  # tokens; coarser than the engine's blocks, so that a long prompt costs few hashes
MAX_INDEX_BLOCKS = 2**18  # a replica; 8 million tokens
MAX_BLOCKS = 2**20  # all replicas together; some 400 bytes each

# A load is counted in completions; this many prompt tokens, still to be computed, weigh as much as one completion.
TOKENS_A_COMPLETION = 1024
# A replica with a cached prefix is not preferred beyond FACTOR times the least busy one's load, or AMOUNT more than it.
BUSY_FACTOR = 1.5
BUSY_AMOUNT = 8.0
# Replicas that a choice looks at: so many at random, and so many of those that have most of the prompt.
CANDIDATES = 8
# A shared beginning is worth a home if it is so long; prompts that differ behind this many tokens have the same homes.
HOME_TOKENS = 256
HOMES = 2
RING_POINTS = 32  # of a replica on the ring: what one has of all beginnings differs by 18% (one over the root)


class Prompt(NamedTuple):
    """What the router wants to know of a prompt."""

    # A hash for each full block, of all tokens up to its end.
    hashes: list[int]
    # Where its beginning is on the ring; None if it is too short to have a home.
    point: int | None


class PrefixIndex:
    """The blocks that one replica probably has cached, at most `capacity` of them; adding and matching cost O(blocks).

    Whenever a block is in, all before it in its prompt are, because it is always forgotten before them.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self._parents: OrderedDict[int, int | None] = OrderedDict()  # block -> the one before; least recent first

    def __len__(self) -> int:
        return len(self._parents)

    def __iter__(self) -> Iterator[int]:
        return iter(self._parents)

    @property
    def fill(self) -> float:
        """Of its capacity, 0 to 1."""
        return len(self._parents) / self.capacity

    def match(self, hashes: list[int]) -> int:
        """How many leading blocks of a prompt are known."""
        if not hashes or hashes[0] not in self._parents:
            return 0
        return bisect_left(hashes, True, key=lambda block: block not in self._parents)

    def add(self, hashes: list[int], room: int) -> tuple[list[int], list[int]]:
        """A prompt was sent: its blocks are the most recent now, the first one last. What is too much is forgotten.

        room: blocks that it may have, beside its capacity. Returns (blocks that are new, blocks that are forgotten).
        """
        room = min(self.capacity, room)
        hashes = hashes[:room]
        new = hashes[self.match(hashes) :]
        for i in range(len(hashes) - 1, -1, -1):
            self._parents[hashes[i]] = hashes[i - 1] if i else None
            self._parents.move_to_end(hashes[i])
        return new, [self._parents.popitem(last=False)[0] for _ in range(len(self._parents) - room)]

    def check_integrity(self) -> None:
        """Raise AssertionError unless it is within its capacity and every block's predecessor is in and more recent."""
        assert len(self._parents) <= self.capacity, f"{len(self._parents)} blocks exceed {self.capacity}"
        place = {block: number for number, block in enumerate(self._parents)}
        for block, parent in self._parents.items():
            assert parent is None or place.get(parent, -1) > place[block], f"block {block} outlived its prefix"


class Choice(NamedTuple):
    """Where a prompt goes. cached_tokens: of its beginning, that the replica probably has."""

    replica_id: str
    cached_tokens: int


class Router:
    """A front's choices for one model. Not thread-safe.

    key: fronts with the same one give a beginning the same homes; a secret, so that clients cannot aim at a replica.
    """

    def __init__(self, key: bytes, rng: random.Random | None = None):
        self.key = key
        self._rng = rng or random.Random()
        self._indexes: dict[str, PrefixIndex] = {}
        self._holders: dict[int, tuple[str, ...]] = {}  # block -> the replicas whose index has it
        self._ring: list[tuple[int, str]] = []  # (point, replica), in the order of the points

    @property
    def replicas(self) -> set[str]:
        """Those that were added."""
        return set(self._indexes)

    def add_replica(self, replica_id: str, num_kv_tokens: int) -> None:
        """num_kv_tokens: tokens that its KV pool holds. One that is there already keeps what is known of it."""
        if replica_id not in self._indexes:
            self._indexes[replica_id] = PrefixIndex(min(max(num_kv_tokens // ROUTING_BLOCK, 1), MAX_INDEX_BLOCKS))
            for number in range(RING_POINTS):
                insort(self._ring, (self._point(f"{replica_id} {number}".encode()), replica_id))

    def remove_replica(self, replica_id: str) -> None:
        """Unknown ids are no error."""
        if (index := self._indexes.pop(replica_id, None)) is not None:
            self._forget(replica_id, index)
            self._ring = [each for each in self._ring if each[1] != replica_id]

    def prompt(self, token_ids: list[int], salt: str = "", cache_key: str = "") -> Prompt:
        """What `choose` takes. Prompts of different salts share no block.

        cache_key: if given, prompts with the same one have the same homes, however long they are and begin.

        Blocks are for this process alone, so Python's own hash will do, which is keyed for each process: collisions are
        harmless, and cannot be aimed at.
        """
        data = array("q", token_ids).tobytes()
        size = ROUTING_BLOCK * 8
        parent = hash(salt)
        hashes = []
        for start in range(0, len(data) - size + 1, size):
            parent = hash((parent, data[start : start + size]))
            hashes.append(parent)
        if cache_key:
            return Prompt(hashes, self._point(f"{salt} {cache_key}".encode()))
        if len(token_ids) < HOME_TOKENS:
            return Prompt(hashes, None)
        return Prompt(hashes, self._point(salt.encode() + data[: HOME_TOKENS * 8]))

    def choose(self, prompt: Prompt, usable: Sequence[str], load: Callable[[str], Load | None]) -> Choice:
        """The replica for a prompt, and remember that it got it.

        usable: the replicas that may be chosen, at least one, all of them added before. load: of a replica; None if it
        may not be chosen.

        It looks at CANDIDATES of them at random (at all, if there are no more) and at as many that have most of the
        prompt. Of those that have some of it and are not too busy, it takes the one that has most; else the less busy
        home; if homes are too busy, the least busy one. Among equals the one with most of its cache free, so that one
        replica does not evict what would fit into another; then at random.
        """
        hashes = prompt.hashes
        few = len(usable) <= CANDIDATES
        seen = list(usable) if few else [usable[int(self._rng.random() * len(usable))] for _ in range(CANDIDATES)]
        loads = {each: load(each) for each in (seen if few else seen + self._with_most(hashes))}
        busy = {replica_id: weight(load) for replica_id, load in loads.items() if load is not None}
        matched = {each: self._indexes[each].match(hashes) * ROUTING_BLOCK for each in busy}
        least = min(busy.values())
        limit = max(least * BUSY_FACTOR, least + BUSY_AMOUNT)
        # What a hit saves is work that the replica has less to do: a long prefix may wait longer for its replica.
        fit = [each for each in busy if matched[each] and busy[each] - matched[each] / TOKENS_A_COMPLETION <= limit]
        longest = max((matched[each] for each in fit), default=0)
        candidates = [each for each in fit if matched[each] == longest]
        if not candidates:
            homes = {each: weight(load(each) or Load()) for each in self._homes(prompt.point, load)}
            busy |= homes
            candidates = [each for each in homes if homes[each] <= limit] or list(busy)
        chosen = min(candidates, key=lambda each: (busy[each], self._indexes[each].fill, self._rng.random()))
        cached = self._indexes[chosen].match(hashes) * ROUTING_BLOCK
        self._add(chosen, hashes)
        return Choice(chosen, cached)

    def check_integrity(self) -> None:
        """Raise AssertionError if an index is broken, or the map or the ring differs from the indexes."""
        for index in self._indexes.values():
            index.check_integrity()
        pairs = [(block, replica_id) for block, holders in self._holders.items() for replica_id in holders]
        assert len(pairs) == len(set(pairs)), "a block has a holder twice"
        assert set(pairs) == {(block, each) for each, index in self._indexes.items() for block in index}
        assert all(self._holders.values()), "a block without holders is kept"
        assert self._ring == sorted(self._ring)
        assert sorted(each for _, each in self._ring) == sorted(list(self._indexes) * RING_POINTS)

    def _point(self, data: bytes) -> int:
        return int.from_bytes(sha256(self.key + data).digest()[:8])

    def _homes(self, point: int | None, load: Callable[[str], Load | None]) -> Iterator[str]:
        """The first replicas at or behind a point of the ring that may be chosen."""
        if point is None:
            return
        start, found = bisect_left(self._ring, (point, "")), set[str]()
        for i in range(start - len(self._ring), start):
            replica_id = self._ring[i][1]
            if replica_id not in found and load(replica_id) is not None:
                found.add(replica_id)
                yield replica_id
                if len(found) == HOMES:
                    return

    def _with_most(self, hashes: list[int]) -> list[str]:
        """Up to CANDIDATES replicas that have most of a prompt, and some that have less of it."""
        found: list[str] = []
        length = bisect_left(hashes, True, key=lambda block: block not in self._holders)
        while length and len(found) < CANDIDATES:
            holders = self._holders[hashes[length - 1]]
            found += holders if len(holders) <= CANDIDATES else self._rng.sample(holders, CANDIDATES)
            # The longest beginning that more replicas have: who has a block has all before it.
            length = bisect_left(hashes, -len(holders), 0, length, key=lambda block: -len(self._holders[block]))
        return found

    def _add(self, replica_id: str, hashes: list[int]) -> None:
        new, forgotten = self._indexes[replica_id].add(hashes, max(MAX_BLOCKS // len(self._indexes), 1))
        for block in new:
            self._holders[block] = (*self._holders.get(block, ()), replica_id)
        self._forget(replica_id, forgotten)

    def _forget(self, replica_id: str, blocks: Iterable[int]) -> None:
        for block in blocks:
            holders = self._holders.pop(block)
            if len(holders) > 1:
                self._holders[block] = tuple(each for each in holders if each != replica_id)


def weight(load: Load) -> float:
    """How busy a replica is, in completions."""
    return load.completions + load.queued_tokens / TOKENS_A_COMPLETION
