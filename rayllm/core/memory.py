"""`KVMemory`: the blocks of both pools, the prefix cache over them, and the moves between them that a plan makes.

The prefix cache has two tiers. A cached block that the device needs for something else is demoted to the host pool,
where it stays findable until it is the least recently used there; a prompt that matches it brings it back. To swap a
sequence out is to demote its full blocks and pin them; it comes back by the same match as any prompt, and computes the
tokens of its last, partial block again. So a content is on the host once, whoever put it there. Both pools are
`BlockManager`s: pinned blocks stay, everything else on the host is evicted least recently used first.

Plans make the moves, all swap-outs of a plan before its swap-ins, so a device block may be handed out as soon as its
swap-out is noted. A host block that a plan reads is held until the plan is complete, because a swap-out of the same
plan would overwrite it first.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import NamedTuple

from rayllm.api.types import KVCosts
from rayllm.core.blocks import BlockManager
from rayllm.core.prefix_cache import PrefixCache
from rayllm.core.sequence import Sequence
from rayllm.core.write_ahead import WriteAhead, WriteAheadLimits


class KVWindow(NamedTuple):
    """Where a sequence's block table may begin, if no layer looks farther back than a sliding window.

    Position p attends to positions p - window < j <= p in every layer, so once all tokens before p are computed, blocks
    that end at or before p - window are never read again. If a single layer sees everything, all blocks are kept.
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

    def longest(self, num_blocks: int) -> int:
        """Tokens that a sequence can grow to in a pool of num_blocks blocks."""
        if self.most_blocks(sys.maxsize) <= num_blocks:
            return sys.maxsize
        return num_blocks * self.block_size


class Match(NamedTuple):
    """Where the beginning of a sequence is, block by block."""

    # Device blocks; None where only the host has the content.
    blocks: list[int | None]
    # The host's blocks for those, in order.
    host: list[int]
    # The block of the sequence that `blocks` begins with; those before it are not needed.
    first: int = 0

    @property
    def end(self) -> int:
        """Leading blocks of the sequence that need not be computed."""
        return self.first + len(self.blocks)

    @property
    def on_device(self) -> list[int]:
        """The device blocks alone."""
        return [block for block in self.blocks if block is not None]


class Moves(NamedTuple):
    """What a plan moves; the fields are those of `StepPlan`."""

    swap_outs: list[tuple[int, int]]
    swap_ins: list[tuple[int, int]]
    write_backs: list[tuple[int, int]]
    await_write_backs: int | None


class KVMemory:
    """The KV cache of one engine, as the scheduler sees it.

    num_blocks, num_cpu_blocks: of the device pool and of the host pool (0 for none).
    caching: whether prompts may begin with blocks that others computed.
    costs: seconds that moving and computing take, as the workers measured them; required with a host pool.
    sliding_window: tokens that the layer that sees most sees; None for all.
    write_ahead: how far ahead of their reuse cached blocks are copied to the host.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        num_cpu_blocks: int = 0,
        caching: bool = True,
        costs: KVCosts | None = None,
        sliding_window: int | None = None,
        write_ahead: WriteAheadLimits = WriteAheadLimits(reach=0),
    ):
        if num_cpu_blocks and costs is None:
            raise ValueError("a host pool needs the measured costs")
        self.block_size = block_size
        self.caching = caching
        self.costs = costs or KVCosts(0.0, 0.0, 0.0)
        self.window = KVWindow(sliding_window, block_size)
        self.cache = PrefixCache(block_size)
        self.cpu_cache = PrefixCache(block_size)
        # Whether cached blocks go to the host before they are reused: if moving one out and in is the cheaper way.
        self.tiered = (
            caching
            and num_cpu_blocks > 0
            and self.costs.swap_out_block + self.costs.swap_in_block < self.costs.recompute(block_size)
        )
        self.gpu = BlockManager(
            num_blocks, block_size, self.cache if caching else None, self._demote if self.tiered else None
        )
        self.cpu = BlockManager(num_cpu_blocks, block_size, self.cpu_cache)
        self.num_swapped = 0  # sequences that have pinned blocks
        self.num_swapped_out = self.num_swapped_in = 0  # blocks moved so far
        self._write_ahead = WriteAhead(self.gpu, self.cache, self.cpu, self.cpu_cache, write_ahead)
        self._num_groups = 0
        # The plan in the making:
        self._await_write_backs: int | None = None
        self._swap_outs: dict[int, int] = {}  # host block -> device block; a later content replaces an earlier one
        self._swap_ins: list[tuple[int, int]] = []
        self._arriving: set[int] = set()  # device blocks that it fills
        self._reading: list[int] = []  # host blocks held for its swap-ins

    # ---------------------------------------------------------------------------------------------- prefix cache

    def root_hash(self, salt: str) -> bytes:
        """Where a new request's hash chain starts; without prefix caching no two requests start from the same."""
        self._num_groups += 1
        return self.cache.root(salt if self.caching else f"request {self._num_groups}")

    def looks_up(self, seq: Sequence) -> bool:
        """Whether a sequence may begin with cached blocks: not if every position has to be computed."""
        group = seq.group
        prompt_logprobs = group.params.prompt_logprobs is not None and seq.fresh and seq.index == 0
        return not prompt_logprobs and group.pooling != "mean"

    def match(self, seq: Sequence) -> Match:
        """Where the beginning of a waiting sequence is. At least its last token is left to compute, for its logits.

        Blocks that only the host has do not count if they take longer to move than to compute, unless the sequence
        was swapped out and they are its own.
        """
        if not self.looks_up(seq) or not (self.caching or seq.pinned):
            return Match([], [])
        hashes = self._hashes(seq, (len(seq.token_ids) - 1) // self.block_size)
        reads_host = self.tiered or bool(seq.pinned)
        if self.window.tokens is not None:
            return self._match_window(seq, hashes, reads_host)
        found: list[int | None] = list(self.cache.match(hashes))
        if not reads_host or len(found) == len(hashes):
            return Match(found, [])
        hole, host = len(found), []
        for digest in hashes[hole:]:
            block = self.cache.find(digest)
            if block is None:
                host_block = self.cpu_cache.find(digest)
                if host_block is None:
                    break
                host.append(host_block)
            found.append(block)
        if not self._moving_pays(seq, len(host), len(found) - hole):
            return Match(found[:hole], [])
        return Match(found, host)

    def _match_window(self, seq: Sequence, hashes: list[bytes], reads_host: bool) -> Match:
        """The longest beginning whose last window is there."""
        match = self._found(hashes, self._window_end(hashes, reads_host=False))
        if reads_host:
            farther = self._found(hashes, self._window_end(hashes, reads_host=True))
            if self._moving_pays(seq, len(farther.host), farther.end - match.end):
                return farther
        return match

    def _window_end(self, hashes: list[bytes], *, reads_host: bool) -> int:
        """The most leading blocks of which all are there that what follows them can see."""
        end = first = len(hashes)  # blocks first..end are there
        while first > self.window.first_block(end * self.block_size):
            first -= 1
            digest = hashes[first]
            if self.cache.find(digest) is None and not (reads_host and self.cpu_cache.find(digest) is not None):
                end = first
        return end

    def _found(self, hashes: list[bytes], end: int) -> Match:
        """The match of `end` leading blocks, of which the last window is there."""
        first = self.window.first_block(end * self.block_size)
        blocks = [self.cache.find(digest) for digest in hashes[first:end]]
        missing = (digest for digest, block in zip(hashes[first:end], blocks, strict=True) if block is None)
        host = [block for digest in missing if (block := self.cpu_cache.find(digest)) is not None]
        return Match(blocks, host, first)

    def _moving_pays(self, seq: Sequence, num_moved: int, num_won: int) -> bool:
        """Whether to bring num_moved blocks from the host, with which num_won blocks need not be computed."""
        if not num_moved:
            return num_won > 0
        recompute = self.costs.recompute(num_won * self.block_size)
        return bool(seq.pinned) or self.costs.swap_in(num_moved) < recompute

    def register(self, seq: Sequence, num_tokens: int) -> None:
        """Make the full blocks among the first num_tokens tokens (ids known, KV written or scheduled) findable."""
        full = num_tokens // self.block_size
        hashes = self._hashes(seq, full)
        first = seq.first_block
        for i in range(max(seq.num_registered, first), full):
            self.cache.register(hashes[i], seq.block_table[i - first])
        seq.num_registered = full
        seq.next_full = (full + 1) * self.block_size

    def _hashes(self, seq: Sequence, num_blocks: int) -> list[bytes]:
        """The hashes of a sequence's leading full blocks."""
        self.cache.extend(seq.block_hashes, seq.group.root_hash, seq.token_ids, num_blocks)
        return seq.block_hashes if len(seq.block_hashes) == num_blocks else seq.block_hashes[:num_blocks]

    # ---------------------------------------------------------------------------------------------- the host's tier

    def _demote(self, block: int, digest: bytes) -> None:
        """Keep on the host what a cached device block holds that is about to be reused."""
        step_id = self._write_ahead.reuse(block)
        if step_id is not None:
            self._await_write_backs = max(self._await_write_backs or 0, step_id)
        host_block = self.cpu_cache.find(digest)
        if host_block is not None:
            self.cpu.touch(host_block)
        elif self.cpu.num_free:
            self.cpu.release([self._move_out(block, digest)])

    def _move_out(self, block: int, digest: bytes) -> int:
        """A new host block that the plan in the making fills with a device block's content; the caller holds it."""
        (host_block,) = self.cpu.allocate(1)
        self.cpu_cache.register(digest, host_block)
        self._swap_outs[host_block] = block
        return host_block

    def num_to_move(self, seq: Sequence) -> int | None:
        """Blocks to move to swap a running sequence out; None if that is not possible.

        The host may lack room, or the sequence a full block. And behind a sliding window the last block may be full,
        but with its last token in flight, so that it has no hash, while what the block before it sees is gone.
        """
        hashes = self._full_blocks(seq)
        end = seq.first_block + len(hashes)
        if not hashes or self.window.first_block(end * self.block_size) < seq.first_block:
            return None
        found = [self.cpu_cache.find(digest) for digest in hashes]
        held = [block for block in found if block is not None]
        missing = len(found) - len(held)
        return missing if missing <= self.cpu.num_free_after(held) else None

    def pin(self, seq: Sequence) -> None:
        """Swap a running sequence out: hold its full blocks on the host; the plan moves those that are not there.

        Blocks behind the window have to be dropped before. The device blocks may be released at once. There must be
        room: see `num_to_move`.
        """
        hashes = self._full_blocks(seq)
        found = [self.cpu_cache.find(digest) for digest in hashes]
        self.cpu.acquire(block for block in found if block is not None)
        for block, digest, host_block in zip(seq.block_table, hashes, found, strict=False):
            seq.pinned.append(self._move_out(block, digest) if host_block is None else host_block)
        self.num_swapped += 1

    def unpin(self, seq: Sequence) -> None:
        """Let go of a sequence's host blocks, if it has any. They stay findable."""
        if seq.pinned:
            self.cpu.release(seq.pinned)
            seq.pinned = []
            self.num_swapped -= 1

    def num_kept(self, seq: Sequence) -> int:
        """Leading blocks of a running sequence that others keep in the prefix cache, as far as it would begin there."""
        if not self.caching:
            return 0
        first = kept = seq.first_block
        for block in seq.block_table[: max(0, seq.num_registered - first)]:
            if not self.gpu.is_shared(block):
                break
            kept += 1
        return kept if self.window.first_block(kept * self.block_size) >= first else 0

    def _full_blocks(self, seq: Sequence) -> list[bytes]:
        """The hashes of a running sequence's full blocks on the device, all of whose tokens are known and computed."""
        full = min(seq.num_computed, len(seq.token_ids)) // self.block_size
        return self._hashes(seq, full)[seq.first_block :]

    # ---------------------------------------------------------------------------------------------- admission

    def num_free_after(self, match: Match) -> int:
        """Device blocks that would be free if what a match found were claimed."""
        return self.gpu.num_free_after(match.on_device) - len(match.host)

    def claim(self, seq: Sequence, match: Match, num_tokens: int) -> bool:
        """Give a waiting sequence its block table for num_tokens tokens, which begins with a match.

        Returns whether the plan in the making fills any of these blocks, so that only later plans should read them.
        """
        seq.first_block = match.first
        self.gpu.acquire(match.on_device)
        self.cpu.acquire(match.host)
        self._reading += match.host
        self.unpin(seq)
        fresh = self.gpu.allocate(len(match.host) + max(0, self.gpu.blocks_for(num_tokens) - match.end))
        incoming = zip(match.host, fresh, strict=False)
        for i, found in enumerate(match.blocks, start=match.first):
            block = found
            if block is None:
                host_block, block = next(incoming)
                self._swap_ins.append((host_block, block))
                self._arriving.add(block)
                if self.caching:
                    self.cache.register(seq.block_hashes[i], block)
            seq.block_table.append(block)
        seq.block_table += fresh[len(match.host) :]
        seq.capacity = (seq.first_block + len(seq.block_table)) * self.block_size
        return not self._arriving.isdisjoint(seq.block_table)

    # ---------------------------------------------------------------------------------------------- running sequences

    def extend_table(self, seq: Sequence, num_blocks: int) -> list[int]:
        """Give a running sequence num_blocks more blocks; there must be as many free. Returns them."""
        blocks = self.gpu.allocate(num_blocks)
        seq.block_table += blocks
        seq.capacity += num_blocks * self.block_size
        return blocks

    def drop_behind(self, seq: Sequence) -> None:
        """Let go of a running sequence's blocks behind the window of its next token; cached ones stay findable.

        Nothing of the sequence may be scheduled in the step in the making, whose plan may hand these blocks out again.
        """
        count = self.window.first_block(seq.num_computed) - seq.first_block
        if count > 0:
            self.gpu.release(seq.block_table[:count])
            del seq.block_table[:count]
            seq.first_block += count

    # ---------------------------------------------------------------------------------------------- the plan

    def take_moves(self, step_id: int, num_tokens: int) -> Moves:
        """The moves noted since the last call, for a plan that is complete now. num_tokens: that it computes."""
        write_backs = []
        if self.tiered:
            write_backs = self._write_ahead.choose(step_id, num_tokens, self.cpu.num_free - len(self._swap_outs))
            for _block, host_block in write_backs:
                self._swap_outs.pop(host_block, None)  # nobody needs any more what it was to hold
        swap_outs = [(block, host_block) for host_block, block in self._swap_outs.items()]
        moves = Moves(swap_outs, self._swap_ins, write_backs, self._await_write_backs)
        self._await_write_backs = None
        self.num_swapped_out += len(swap_outs) + len(write_backs)
        self.num_swapped_in += len(moves.swap_ins)
        self.cpu.release(self._reading)
        self._swap_outs, self._swap_ins, self._arriving, self._reading = {}, [], set(), []
        return moves

    def check_integrity(self, tables: Iterable[list[int]], pinned: Iterable[list[int]]) -> None:
        """Raise AssertionError unless all holders are in these lists, between two plans."""
        self.gpu.check_integrity(tables)
        self.cpu.check_integrity(pinned)
        assert not (self._swap_ins or self._arriving or self._reading), "swap-ins were left out of the last plan"
        for host_block in self._swap_outs:
            assert 0 <= host_block < self.cpu.num_blocks, f"host block {host_block} does not exist"
