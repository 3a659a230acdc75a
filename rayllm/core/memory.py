"""`KVMemory`: the blocks of both pools, the prefix cache over them, and the moves between them that a plan makes.

The prefix cache has two tiers. A cached block that the device needs for something else is demoted to the host pool,
where it stays findable until it is the least recently used there; a prompt that matches it brings it back. To swap a
sequence out is to demote its full blocks and pin them; it comes back by the same match as any prompt, and computes the
tokens of its last, partial block again. So a content is on the host once, whoever put it there. Both pools are
`BlockManager`s: pinned blocks stay, everything else on the host is evicted least recently used first.

Plans make the moves, all swap-outs of a plan before its swap-ins, so a device block may be handed out as soon as its
swap-out is noted. A host block that a plan reads is held until the plan is complete, because a swap-out of the same
plan would overwrite it first.

A block holds the tokens of one group of layers (`config.kv_groups`), and a sequence has a block table for each group.
The tables reach equally far; those of groups with a sliding window begin later. Blocks of all groups are alike and come
from the same pools.

What a group with a window has let go of is of use only to a prompt that parts from this one there, while every prompt
needs what groups without a window hold. So such blocks are stale: they are reused before other cached blocks, and do
not go to the host. A prompt that finds its beginning in the groups without a window, but not the windows at the end of
that, shows where prompts part, and what it leaves there is kept like all else.

Where layers keep a recurrent state, a block of their groups holds the state after the last of its tokens that is
computed. Such a group is one with a window of two tokens: the next token needs the state at the end of the token before
it, and writes its own, so the states at borders of blocks are cached, swapped and shared as other blocks are.

A block that is demoted only when it is reused holds up the step that reuses it, because its content has to be out of
the way first. So the blocks that will be reused next are copied ahead, beside the steps before: a transfer that nothing
waits for, unless the blocks are needed sooner than they are gone.
"""

from __future__ import annotations

import bisect
import operator
import sys
from collections.abc import Iterable
from itertools import compress, zip_longest
from typing import Literal, NamedTuple

from rayllm.api.types import KVCosts
from rayllm.core.blocks import BlockManager
from rayllm.core.prefix_cache import group_key, group_keys
from rayllm.core.sequence import Sequence

PreemptionMode = Literal["cost", "recompute", "swap"]
# The order of reuse is read anew, a walk over all that is in reach, each time this part of the reach was allocated.
READS_PER_REACH = 8


class KVWindow(NamedTuple):
    """Where a sequence's block table may begin, in a group whose layers look no farther back than a sliding window.

    Position p attends to positions p - window < j <= p in every layer, so once all tokens before p are computed, blocks
    that end at or before p - window are never read again. Without a window all blocks are kept.
    """

    # What a token sees at most, itself included, in the layer that sees most; None for everything.
    tokens: int | None
    block_size: int

    def first_block(self, position: int) -> int:
        """The first block that a sequence with `position` computed tokens has to keep.

        That is what the token at the last block boundary sees: a sequence that is swapped out comes back there.
        """
        if self.tokens is None:
            return 0
        boundary = position - position % self.block_size
        return max(0, boundary - self.tokens + 1) // self.block_size

    def most_blocks(self, num_tokens: int) -> int:
        """Blocks without which a sequence cannot grow to num_tokens tokens, one token after the other."""
        whole = -(-num_tokens // self.block_size)
        if self.tokens is None:
            return whole
        return min(whole, (self.tokens + self.block_size - 2) // self.block_size + 1)


def most_blocks(windows: Iterable[KVWindow], num_tokens: int) -> int:
    """Blocks of all groups without which a sequence cannot grow to num_tokens tokens, one token after the other."""
    return sum(window.most_blocks(num_tokens) for window in windows)


def longest(windows: tuple[KVWindow, ...], num_blocks: int) -> int:
    """Tokens that a sequence can grow to in a pool of num_blocks blocks."""
    if all(window.tokens is not None for window in windows) and most_blocks(windows, sys.maxsize) <= num_blocks:
        return sys.maxsize
    size = windows[0].block_size
    return size * (
        bisect.bisect_right(range(num_blocks + 1), num_blocks, key=lambda count: most_blocks(windows, count * size)) - 1
    )


class Match(NamedTuple):
    """Where the beginning of a sequence is, block by block, in each group."""

    # Leading blocks of the sequence that need not be computed.
    end: int
    # By group, the first block that is needed; those before it are not.
    first: list[int]
    # By group, the device blocks from there to the end; None where only the host has the content.
    blocks: list[list[int | None]]
    # The host's blocks for those, group after group.
    host: list[int]
    # Leading blocks that all groups without a window have; `end` if there are only such, or none.
    reach: int

    @property
    def on_device(self) -> list[int]:
        """The device blocks alone."""
        return [block for blocks in self.blocks for block in blocks if block is not None]

    @property
    def num_far(self) -> int:
        """For how many of the sequence's blocks the device lacks something that the host has."""
        if len(self.blocks) == 1 or not self.host:
            return len(self.host)
        from_the_end = zip_longest(*(blocks[::-1] for blocks in self.blocks), fillvalue=0)
        return sum(None in parts for parts in from_the_end)


class Moves(NamedTuple):
    """What a plan moves; the fields are those of `StepPlan`."""

    swap_outs: list[tuple[int, int]]
    swap_ins: list[tuple[int, int]]
    write_backs: list[tuple[int, int]]
    await_write_backs: int | None


class WriteBackLimits(NamedTuple):
    """How many cached blocks are copied to the host before they are reused."""

    # How far ahead in the order of reuse, in blocks.
    reach: int
    # Blocks that a step may copy whatever it computes; a long step may copy twice as many as its tokens fill on top.
    blocks_a_step: int = 32
    # At most this share of the host pool may hold what the device still has: one part in so many.
    host_share: int = 4


class KVMemory:
    """The KV cache of one engine, as the scheduler sees it.

    num_blocks, num_cpu_blocks: of the device pool and of the host pool (0 for none).
    caching: whether prompts may begin with blocks that others computed.
    costs: seconds that moving and computing take, as the workers measured them; None without a host pool.
    windows: by group, the tokens that the layer that sees most sees, None for all; at least one group.
    write_back: how far ahead of their reuse cached blocks are copied to the host.
    recurrent: some groups hold states (`config.kv_groups`), into which each token goes once. So a block that a plan
    writes is of use to later plans only, and a sequence cannot compute a token twice from what is there.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        num_cpu_blocks: int = 0,
        caching: bool = True,
        costs: KVCosts | None = None,
        windows: Iterable[int | None] = (None,),
        write_back: WriteBackLimits = WriteBackLimits(reach=0),
        recurrent: bool = False,
    ):
        self.block_size, self.recurrent = block_size, recurrent
        self.caching = caching
        self.costs = costs or KVCosts(0.0, 0.0, 0.0)
        self.windows = tuple(KVWindow(tokens, block_size) for tokens in windows)
        self.num_groups = len(self.windows)
        # Whether any group lets go of blocks; otherwise a prompt gets all of its blocks at once.
        self.forgets = any(window.tokens is not None for window in self.windows)
        self.forgets_all = all(window.tokens is not None for window in self.windows)
        # Whether cached blocks go to the host before they are reused: if moving one out and in is the cheaper way.
        self.tiered = (
            caching
            and num_cpu_blocks > 0
            and self.num_groups * (self.costs.swap_out_block + self.costs.swap_in_block)
            < self.costs.recompute(block_size)
        )
        self.gpu = BlockManager(num_blocks, block_size, self._demote if self.tiered else None)
        self.cpu = BlockManager(num_cpu_blocks, block_size)
        self.num_swapped_out = self.num_swapped_in = 0  # blocks moved so far
        self._num_roots = 0
        self._write_back_limits = write_back._replace(
            reach=min(write_back.reach, num_cpu_blocks // write_back.host_share)
        )
        self.clear()

    def clear(self) -> None:
        """Forget what is in both pools, and who holds it."""
        self.gpu.clear()
        self.cpu.clear()
        self.num_swapped = 0  # sequences that have pinned blocks
        # The plan in the making:
        self._await_write_backs: int | None = None
        self._swap_outs: dict[int, int] = {}  # host block -> device block; a later content replaces an earlier one
        self._swap_ins: dict[int, int] = {}  # device block -> host block, which is held
        # What is copied ahead:
        self._next: list[int] = []  # device blocks that may have to be copied, the last first
        self._read_at = self.gpu.num_allocated  # when that was read
        self._copied: dict[int, int | None] = {}  # cached device block with a copy -> the step it started with

    # ---------------------------------------------------------------------------------------------- prefix cache

    def root_hash(self, salt: str, adapter: int | None = None) -> bytes:
        """Where a new request's hash chain starts; without prefix caching no two requests start from the same."""
        self._num_roots += 1
        return self.gpu.cache.root(salt if self.caching else f"request {self._num_roots}", adapter)

    def looks_up(self, seq: Sequence) -> bool:
        """Whether a sequence may begin with cached blocks: not if every position has to be computed."""
        group, request = seq.group, seq.group.request
        prompt_logprobs = request.params.prompt_logprobs is not None and group.fresh and seq is group.sequences[0]
        return not prompt_logprobs and request.pooling != "mean"

    def match(self, seq: Sequence) -> Match:
        """Where the beginning of a waiting sequence is. At least its last token is left to compute, for its logits.

        Blocks that only the host has do not count if they take longer to move than to compute, unless the sequence
        was swapped out and they are its own.
        """
        if not self.looks_up(seq) or not (self.caching or seq.pinned):
            return Match(0, [0] * self.num_groups, [[] for _ in self.windows], [], 0)
        hashes = self._hashes(seq, (len(seq.token_ids) - 1) // self.block_size)
        found = self._longest(hashes, reads_host=self.tiered or bool(seq.pinned))
        if found.host and not seq.pinned:
            near = self._longest(hashes, reads_host=False)
            recompute = self.costs.recompute((found.end - near.end) * self.block_size)
            if self.costs.swap_in(len(found.host)) >= recompute:
                return near
        return found

    def _longest(self, hashes: list[bytes], *, reads_host: bool) -> Match:
        """The longest beginning of which everything is there that what follows it can see.

        That is all of it for groups without a window, and its last window for the others.
        """
        end, rest = len(hashes), []
        for group, window in enumerate(self.windows):
            if window.tokens is not None:
                rest.append(group)
                continue
            place = len(self.gpu.cache.match(group_keys(hashes[:end], group)))
            while reads_host and place < end and self._is_there(hashes[place], group, reads_host):
                place += 1
            end = place
        reach = end
        if rest:
            end = self._window_end(hashes, end, rest, reads_host)
        first = [window.first_block(end * self.block_size) for window in self.windows]
        blocks: list[list[int | None]] = []
        host: list[int] = []
        for group, begin in enumerate(first):
            keys = group_keys(hashes[begin:end], group)
            found = [self.gpu.cache.find(key) for key in keys]
            blocks.append(found)
            if None in found:
                missing = [self.cpu.cache.find(key) for key, block in zip(keys, found, strict=True) if block is None]
                host += [block for block in missing if block is not None]
        return Match(end, first, blocks, host, reach if len(rest) < self.num_groups else end)

    def _is_there(self, digest: bytes, group: int, reads_host: bool) -> bool:
        key = group_key(digest, group)
        return self.gpu.cache.find(key) is not None or (reads_host and self.cpu.cache.find(key) is not None)

    def _window_end(self, hashes: list[bytes], end: int, groups: list[int], reads_host: bool) -> int:
        """The most leading blocks, at most `end`, of which each of these groups has what follows them can see.

        Each group's last window is searched from its end; if a block is missing, the end is before it, for all groups.
        A block is looked up once.
        """
        lowest = dict.fromkeys(groups, end)  # of each group all blocks from here to the end are there
        turn = agreed = 0  # groups that agree on the end, one after the other
        while agreed < len(groups):
            group = groups[turn % len(groups)]
            place, before = min(lowest[group], end), end
            while place > self.windows[group].first_block(end * self.block_size):
                place -= 1
                if not self._is_there(hashes[place], group, reads_host):
                    end = place
            lowest[group] = place
            agreed = agreed + 1 if end == before else 1
            turn += 1
        return end

    def register(self, seq: Sequence, num_tokens: int) -> None:
        """Make the full blocks among the first num_tokens tokens (ids known, KV written or scheduled) findable."""
        full = num_tokens // self.block_size
        hashes = self._hashes(seq, full)
        for group, table in enumerate(seq.block_tables):
            first = seq.first_blocks[group]
            for i in range(max(seq.num_registered, first), full):
                self.gpu.cache.register(group_key(hashes[i], group) if group else hashes[i], table[i - first])
        seq.num_registered = full
        seq.next_full = (full + 1) * self.block_size

    def _hashes(self, seq: Sequence, num_blocks: int) -> list[bytes]:
        """The hashes of a sequence's leading full blocks."""
        self.gpu.cache.extend(seq.block_hashes, seq.group.root_hash, seq.token_ids, num_blocks)
        return seq.block_hashes if len(seq.block_hashes) == num_blocks else seq.block_hashes[:num_blocks]

    # ---------------------------------------------------------------------------------------------- the host's tier

    def _demote(self, block: int, digest: bytes, worth_keeping: bool) -> None:
        """Keep on the host what a cached device block holds that is about to be reused, if it is worth it."""
        step_id = self._copied.pop(block, None)
        if step_id is not None:
            self._await_write_backs = max(self._await_write_backs or 0, step_id)
        if not worth_keeping:
            return
        host_block = self.cpu.cache.find(digest)
        if host_block is not None:
            self.cpu.touch(host_block)
        elif self.cpu.num_free:
            self.cpu.release([self._move_out(block, digest)])

    def _move_out(self, block: int, digest: bytes) -> int:
        """A new host block that the plan in the making fills with a device block's content; the caller holds it."""
        (host_block,) = self.cpu.allocate(1)
        self.cpu.cache.register(digest, host_block)
        self._swap_outs[host_block] = block
        return host_block

    def _write_back(self, step_id: int, num_tokens: int) -> list[tuple[int, int]]:
        """(device block, host block) to copy beside a step of num_tokens tokens, which has taken all blocks it needs.

        The host blocks are free, and findable by what they will hold.
        """
        limits, gpu = self._write_back_limits, self.gpu
        if gpu.num_allocated - self._read_at >= max(limits.blocks_a_step, limits.reach // READS_PER_REACH):
            self._read_at = gpu.num_allocated
            self._next = [block for block in gpu.next_reused(limits.reach) if block not in self._copied]
            self._next.reverse()
        room = self.cpu.num_free - len(self._swap_outs)
        most = min(room, limits.blocks_a_step + 2 * self.num_groups * num_tokens // self.block_size)
        pairs: list[tuple[int, int]] = []
        while self._next and len(pairs) < most:
            block = self._next.pop()
            digest = gpu.cache.digest_of(block)
            if digest is None or gpu.num_holders(block):
                continue  # empty, or in use again
            if self.cpu.cache.find(digest) is not None:
                self._copied.setdefault(block, None)
                continue
            host_block = self._move_out(block, digest)
            del self._swap_outs[host_block]  # nothing waits for this one, nor needs any more what it was to hold
            self.cpu.release([host_block])
            self._copied[block] = step_id
            pairs.append((block, host_block))
        return pairs

    # ---------------------------------------------------------------------------------------------- preemption

    def swap_out(self, seq: Sequence, mode: PreemptionMode) -> bool:
        """Hold a running sequence's full blocks on the host, if `mode` says so and there is room; whether it did.

        The plan moves those that are not there. Blocks behind the window have to be dropped before, and the device
        blocks may be released at once. "recompute" forgets them, "swap" keeps them, and "cost" does what takes less
        time, by the costs that the workers measured: computing again what the prefix cache will not find, or two
        transfers.
        """
        if mode == "recompute" or not self.cpu.num_blocks or not self.looks_up(seq):
            return False
        # Full blocks, all of whose tokens are known and computed. Behind a sliding window the last one may be full, but
        # with its last token in flight, so that it has no hash, while what the block before it sees is gone.
        full = min(seq.num_computed, len(seq.token_ids)) // self.block_size
        chain, first = self._hashes(seq, full), seq.first_blocks
        needed = [window.first_block(full * self.block_size) for window in self.windows]
        if any(map(operator.lt, needed, first)):
            return False
        blocks, keys = [], []
        for group, (begin, table) in enumerate(zip(first, seq.block_tables, strict=True)):
            blocks += table[: full - begin]
            keys += group_keys(chain[begin:], group)
        if not keys:
            return False
        found = [self.cpu.cache.find(key) for key in keys]
        held = [block for block in found if block is not None]
        missing = len(found) - len(held)
        if missing > self.cpu.num_free_after(held) or (mode == "cost" and not self._swap_pays(seq, missing)):
            return False
        self.cpu.acquire(held)
        for block, key, host_block in zip(blocks, keys, found, strict=True):
            seq.pinned.append(self._move_out(block, key) if host_block is None else host_block)
        self.num_swapped += 1
        return True

    def _swap_pays(self, seq: Sequence, num_out: int) -> bool:
        """Whether moving a running sequence out and in takes less time than computing it again.

        Out go num_out blocks, in comes what the device will not have any more, and the tokens of the last, partial
        block are computed again. Recomputing starts behind what others keep in the prefix cache.
        """
        size, costs, full = self.block_size, self.costs, seq.num_computed // self.block_size
        kept = [self._num_kept(seq, group) for group in range(self.num_groups)]
        num_in = sum(full - end for end in kept)
        start = min(kept)
        if not self.caching or any(
            window.first_block(start * size) < first
            for window, first in zip(self.windows, seq.first_blocks, strict=True)
        ):
            start = 0
        swap = costs.swap_out(num_out) + costs.swap_in(num_in)
        return swap + costs.recompute(seq.num_computed - full * size) < costs.recompute(seq.num_computed - start * size)

    def _num_kept(self, seq: Sequence, group: int) -> int:
        """Up to which of its blocks a sequence's table of a group is kept by others too, from the table's first on."""
        end = first = seq.first_blocks[group]
        if self.caching:
            for block in seq.block_tables[group][: max(0, seq.num_registered - first)]:
                if self.gpu.num_holders(block) < 2:
                    break
                end += 1
        return end

    def unpin(self, seq: Sequence) -> None:
        """Let go of a sequence's host blocks, if it has any. They stay findable."""
        if seq.pinned:
            self.cpu.release(seq.pinned)
            seq.pinned = []
            self.num_swapped -= 1

    # ---------------------------------------------------------------------------------------------- admission

    def num_free_after(self, match: Match) -> int:
        """Device blocks that would be free if what a match found were claimed."""
        return self.gpu.num_free_after(match.on_device) - len(match.host)

    def claim(self, seq: Sequence, match: Match, num_tokens: int) -> bool:
        """Give a waiting sequence its block tables for num_tokens tokens, which begin with a match.

        Returns whether the plan in the making fills any of these blocks, so that only later plans should read them.
        """
        self.gpu.acquire(match.on_device)
        self.cpu.acquire(match.host)
        self.unpin(seq)
        if match.end < match.reach:
            self._touch_beyond(seq, match)
        more = max(0, self.gpu.blocks_for(num_tokens) - match.end)
        fresh = self.gpu.allocate(len(match.host) + self.num_groups * more)
        incoming = zip(match.host, fresh, strict=False)
        own = len(match.host)
        seq.first_blocks, seq.num_matched, seq.parting = match.first, match.end, match.reach
        arrives = False
        for group, (first, found) in enumerate(zip(match.first, match.blocks, strict=True)):
            table = []
            for i, block in enumerate(found, start=first):
                if block is None:
                    host_block, block = next(incoming)
                    self._swap_ins[block] = host_block
                    if self.caching:
                        self.gpu.cache.register(group_key(seq.block_hashes[i], group), block)
                table.append(block)
            arrives = arrives or not self._swap_ins.keys().isdisjoint(table)
            seq.block_tables.append(table + fresh[own : own + more])
            own += more
        seq.capacity = (match.end + more) * self.block_size
        return arrives

    def _touch_beyond(self, seq: Sequence, match: Match) -> None:
        """Keep what was found beyond a match as long as what is written at its reach: only together are they of use.

        The sequence computes it again, but a content that is there stays where it is.
        """
        for group, window in enumerate(self.windows):
            if window.tokens is None:
                for key in group_keys(seq.block_hashes[match.end : match.reach], group):
                    block = self.gpu.cache.find(key)
                    if block is not None:
                        self.gpu.touch(block)

    # ---------------------------------------------------------------------------------------------- running sequences

    def extend_tables(self, seq: Sequence, num_blocks: int) -> list[list[int]]:
        """Give each table of a running sequence num_blocks more blocks; there must be as many free.

        Returns them by group.
        """
        blocks = self.gpu.allocate(num_blocks * self.num_groups)
        seq.capacity += num_blocks * self.block_size
        if self.num_groups == 1:
            seq.block_tables[0] += blocks
            return [blocks]
        parts = [blocks[begin : begin + num_blocks] for begin in range(0, len(blocks), num_blocks)]
        for table, part in zip(seq.block_tables, parts, strict=True):
            table += part
        return parts

    def drop_behind(self, seq: Sequence) -> None:
        """Let go of a running sequence's blocks behind the windows of its next token; cached ones stay findable.

        Nothing of the sequence may be scheduled in the step in the making, whose plan may hand these blocks out again.
        """
        if not self.forgets:
            return
        for group, window in enumerate(self.windows):
            first, table = seq.first_blocks[group], seq.block_tables[group]
            count = window.first_block(seq.num_computed) - first
            if count <= 0:
                continue
            dropped = table[:count]
            del table[:count]
            seq.first_blocks[group] += count
            if self.forgets_all or first >= max(seq.num_matched, seq.parting):
                self.gpu.release(dropped, stale=not self.forgets_all)
                continue
            # What was found by itself, and what the next prompt that parts here looks for.
            seen = range(window.first_block(seq.parting * self.block_size), seq.parting)
            places = range(first, first + count)
            is_kept = [place < seq.num_matched or place in seen for place in places]
            self.gpu.release(list(compress(dropped, map(operator.not_, is_kept))), stale=True)
            self.gpu.release(list(compress(dropped, is_kept)))

    def fork(self, seq: Sequence, parent: Sequence, num_tokens: int) -> None:
        """Let a sequence without blocks hold a running one's blocks of the first num_tokens tokens."""
        end = self.gpu.blocks_for(num_tokens)
        seq.first_blocks = list(parent.first_blocks)
        seq.num_matched, seq.parting = parent.num_matched, parent.parting
        for first, table in zip(parent.first_blocks, parent.block_tables, strict=True):
            seq.block_tables.append(self.gpu.fork(table[: end - first]))
        seq.capacity = end * self.block_size

    def make_writable(self, seq: Sequence, position: int) -> list[tuple[int, int]]:
        """Let a forked sequence write from a position in its last blocks on, or behind them: (source, copy) pairs.

        As `BlockManager.make_writable` has it for each of them. There must be a free block a group.
        """
        index = position // self.block_size
        if index * self.block_size == seq.capacity:
            self.extend_tables(seq, 1)
            return []
        copies = [
            self.gpu.make_writable(table, index - first)
            for first, table in zip(seq.first_blocks, seq.block_tables, strict=True)
        ]
        return [copy for copy in copies if copy is not None]

    def release(self, seq: Sequence) -> None:
        """Give up all device blocks of a sequence, which forgets them."""
        for table in seq.block_tables:
            self.gpu.release(table)
        seq.reset()

    # ---------------------------------------------------------------------------------------------- the plan

    def take_moves(self, step_id: int, num_tokens: int) -> Moves:
        """The moves noted since the last call, for a plan that is complete now. num_tokens: that it computes."""
        write_backs = self._write_back(step_id, num_tokens) if self.tiered else []
        swap_outs = [(block, host_block) for host_block, block in self._swap_outs.items()]
        swap_ins = [(host_block, block) for block, host_block in self._swap_ins.items()]
        moves = Moves(swap_outs, swap_ins, write_backs, self._await_write_backs)
        self.num_swapped_out += len(swap_outs) + len(write_backs)
        self.num_swapped_in += len(swap_ins)
        self.cpu.release(list(self._swap_ins.values()))
        self._await_write_backs, self._swap_outs, self._swap_ins = None, {}, {}
        return moves

    def check_integrity(self, holders: Iterable[Sequence], pinned: Iterable[list[int]]) -> None:
        """Raise AssertionError unless these sequences and lists hold all that is held, between two plans."""
        self.gpu.check_integrity([block for table in seq.block_tables for block in table] for seq in holders)
        self.cpu.check_integrity(pinned)
        assert not self._swap_ins, "swap-ins were left out of the last plan"
        for host_block in self._swap_outs:
            assert 0 <= host_block < self.cpu.num_blocks, f"host block {host_block} does not exist"
