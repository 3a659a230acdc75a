"""Which of a model's replicas gets a prompt: the one that has most of it cached, unless that one is too busy.

A front does not see the replicas' caches. It remembers what it sent where instead: a `PrefixIndex` a replica, of hashes
of blocks of ROUTING_BLOCK tokens, as many as the replica's KV pool holds, forgotten in the order in which the
replica's own cache would (least recently used first, a prompt's end before its beginning). It knows nothing of what
other fronts sent, so it may miss a hit; a wrong guess costs a prefill, never a wrong answer.

Pure Python without a clock or Ray; `front.py` feeds it.
"""

from __future__ import annotations

import random
from array import array
from collections import OrderedDict
from collections.abc import Mapping
from typing import NamedTuple

from rayllm.api.types import Load

ROUTING_BLOCK = 32  # tokens; coarser than the engine's blocks, so that a long prompt costs few hashes
MAX_INDEX_BLOCKS = 2**18  # a replica; 8 million tokens

# A load is counted in completions; this many prompt tokens, still to be computed, weigh as much as one completion.
TOKENS_A_COMPLETION = 1024
# A replica with a cached prefix is not preferred beyond FACTOR times the least busy one's load, or AMOUNT more than it.
BUSY_FACTOR = 1.5
BUSY_AMOUNT = 8.0


def prefix_hashes(token_ids: list[int], salt: str = "") -> list[int]:
    """A hash for each full block of a prompt, of all tokens up to its end. Prompts of different salts share none.

    Python's own hash, which is keyed for each process: collisions are harmless here, and cannot be aimed at.
    """
    data = array("q", token_ids).tobytes()
    size = ROUTING_BLOCK * 8
    parent = hash(salt)
    hashes = []
    for start in range(0, len(data) - size + 1, size):
        parent = hash((parent, data[start : start + size]))
        hashes.append(parent)
    return hashes


class PrefixIndex:
    """The blocks that one replica probably has cached, at most `capacity` of them; adding and matching cost O(blocks).

    Whenever a block is in, all before it in its prompt are, because it is always forgotten before them.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self._parents: OrderedDict[int, int | None] = OrderedDict()  # block -> the one before; least recent first

    def __len__(self) -> int:
        return len(self._parents)

    @property
    def fill(self) -> float:
        """Of its capacity, 0 to 1."""
        return len(self._parents) / self.capacity

    def match(self, hashes: list[int]) -> int:
        """How many leading blocks of a prompt are known."""
        for count, block in enumerate(hashes):
            if block not in self._parents:
                return count
        return len(hashes)

    def add(self, hashes: list[int]) -> None:
        """A prompt was sent: its blocks are the most recent now, the first one last. What is too much is forgotten."""
        hashes = hashes[: self.capacity]
        for i in range(len(hashes) - 1, -1, -1):
            self._parents[hashes[i]] = hashes[i - 1] if i else None
            self._parents.move_to_end(hashes[i])
        while len(self._parents) > self.capacity:
            self._parents.popitem(last=False)

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
    """A front's choices for one model. Not thread-safe."""

    def __init__(self, rng: random.Random | None = None):
        self._rng = rng or random.Random()
        self._indexes: dict[str, PrefixIndex] = {}

    def add_replica(self, replica_id: str, num_kv_tokens: int) -> None:
        """num_kv_tokens: tokens that its KV pool holds."""
        self._indexes[replica_id] = PrefixIndex(min(max(num_kv_tokens // ROUTING_BLOCK, 1), MAX_INDEX_BLOCKS))

    def remove_replica(self, replica_id: str) -> None:
        """Unknown ids are no error."""
        self._indexes.pop(replica_id, None)

    def choose(self, hashes: list[int], loads: Mapping[str, Load]) -> Choice:
        """The replica for a prompt of these `prefix_hashes`, and remember that it got it.

        loads: of the replicas that may be chosen, at least one, all of them added before. Of those that have some of
        the prompt cached and are not too busy, the one that has most; else the least busy one. Among equals the one
        with most of its cache free, so that one replica does not evict what would fit into another; then at random.
        """
        matched = {replica_id: self._indexes[replica_id].match(hashes) * ROUTING_BLOCK for replica_id in loads}
        busy = {replica_id: weight(load) for replica_id, load in loads.items()}
        least = min(busy.values())
        limit = max(least * BUSY_FACTOR, least + BUSY_AMOUNT)
        # What a hit saves is work that the replica has less to do: a long prefix may wait longer for its replica.
        fit = [each for each in loads if matched[each] and busy[each] - matched[each] / TOKENS_A_COMPLETION <= limit]
        longest = max((matched[each] for each in fit), default=0)
        candidates = [each for each in fit if matched[each] == longest] or list(loads)
        chosen = min(candidates, key=lambda each: (busy[each], self._indexes[each].fill, self._rng.random()))
        self._indexes[chosen].add(hashes)
        return Choice(chosen, matched[chosen])

    def check_integrity(self) -> None:
        """Raise AssertionError if an index is broken."""
        for index in self._indexes.values():
            index.check_integrity()


def weight(load: Load) -> float:
    """How busy a replica is, in completions."""
    return load.completions + load.queued_tokens / TOKENS_A_COMPLETION
