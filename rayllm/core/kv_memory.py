"""`KVMemory`: the blocks of both pools, the prefix cache over them, and the moves between them that a plan makes.

The prefix cache has two tiers. A cached block that the device needs for something else is demoted to the host pool,
where it stays findable until it is the least recently used there; a prompt that matches it brings it back. Swapped
sequences hold host blocks of their own, registered in the same tier, so that a content is on the host once. Both pools
are ordinary `BlockManager`s: what swapped sequences hold cannot be evicted, everything else on the host can.

Moves are made by plans, all swap-outs of a plan before its swap-ins, so a device block may be handed out as soon as its
swap-out is noted. A host block that a plan reads is held until the plan is complete, because a swap-out of the same
plan would overwrite it first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from rayllm.api.types import KVCosts
from rayllm.core.block_manager import BlockManager
from rayllm.core.prefix_cache import PrefixCache
from rayllm.core.sequence import Sequence
from rayllm.core.window import KVWindow
from rayllm.core.write_ahead import WriteAhead


class Match(NamedTuple):
    """Where the beginning of a sequence is, block by block.

    blocks: device blocks; None where only the host has it. host: the host's blocks for those, in order. first: the
    block of the sequence that `blocks` begins with; those before it are not needed.
    """

    blocks: list[int | None]
    host: list[int]
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
    """As `StepPlan` has them: (device block, host block) out, (host block, device block) in."""

    swap_outs: list[tuple[int, int]]
    swap_ins: list[tuple[int, int]]
    write_backs: list[tuple[int, int]]
    await_write_backs: int


class KVMemory:
    """costs: what moving and computing take; needed if there are host blocks and a prefix cache to keep in them.

    sliding_window: tokens that the layer that sees most sees; None for all. Blocks behind the window are let go while
    their sequence runs, and a match needs only the blocks of the last window.
    write_ahead: blocks that are copied to the host before they are reused, at most.
    tiered: the prefix cache has its second tier. num_swapped_out, num_swapped_in: blocks moved so far.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        num_cpu_blocks: int,
        block_size: int,
        caching: bool,
        costs: KVCosts | None,
        sliding_window: int | None = None,
        write_ahead: int = 0,
    ):
        self.block_size = block_size
        self.window = KVWindow(sliding_window, block_size)
        self.caching = caching
        self.cache = PrefixCache(block_size)
        self.cpu_cache = PrefixCache(block_size)
        self._costs = costs
        self.tiered = bool(caching and num_cpu_blocks and costs is not None and _tier_pays(costs, block_size))
        demote = self._demote if self.tiered else None
        self.gpu = BlockManager(num_blocks, block_size, self.cache if caching else None, demote)
        self.cpu = BlockManager(num_cpu_blocks, block_size, self.cpu_cache if caching else None)
        self._write_ahead = WriteAhead(self.gpu, self.cache, self.cpu, self.cpu_cache, write_ahead)
        self._await_write_backs = -1
        self.num_swapped_out = self.num_swapped_in = 0
        self._swap_outs: dict[int, int] = {}  # host block -> device block; a later content replaces an earlier one
        self._swap_ins: list[tuple[int, int]] = []
        self._arriving: set[int] = set()  # device blocks that the plan in the making fills
        self._reading: list[int] = []  # host blocks held for its swap-ins

    # ---------------------------------------------------------------------------------------------- prefix cache

    def looks_up(self, seq: Sequence) -> bool:
        """Whether a waiting sequence may begin with cached blocks: not if every position has to be computed."""
        group = seq.group
        prompt_logprobs = group.params.prompt_logprobs is not None and seq.fresh and seq.index == 0
        return self.caching and not prompt_logprobs and group.pooling != "mean"

    def match(self, seq: Sequence) -> Match:
        """Where the cached beginning of a sequence is. At least its last token stays to be computed, for its logits.

        Nothing behind the first block that only the host has counts if it is dearer to move than to compute.
        """
        if not self.looks_up(seq):
            return Match([], [])
        usable = (len(seq.token_ids) - 1) // self.block_size
        self.cache.extend(seq.block_hashes, seq.group.root_hash, seq.token_ids, usable)
        hashes = seq.block_hashes if len(seq.block_hashes) == usable else seq.block_hashes[:usable]
        if self.window.tokens is not None:
            return self._match_window(hashes)
        found: list[int | None] = list(self.cache.match(hashes))
        if not self.tiered or len(found) == usable:
            return Match(found, [])
        return self._match_host(hashes, found)

    def _match_host(self, hashes: list[bytes], found: list[int | None]) -> Match:
        """Go on where the device's tier has a hole."""
        assert self._costs is not None
        hole = len(found)
        host = []
        for digest in hashes[hole:]:
            block = self.cache.find(digest)
            if block is None:
                host_block = self.cpu_cache.find(digest)
                if host_block is None:
                    break
                host.append(host_block)
            found.append(block)
        if host and self._costs.swap_in(len(host)) >= self._costs.recompute((len(found) - hole) * self.block_size):
            return Match(found[:hole], [])
        return Match(found, host)

    def _match_window(self, hashes: list[bytes]) -> Match:
        """The longest beginning whose last window is there: on the device or, if moving that in pays, on the host."""
        end = self._window_end(hashes, lambda digest: self.cache.find(digest) is not None)
        if self.tiered:
            assert self._costs is not None
            farther = self._window_end(
                hashes, lambda digest: self.cache.find(digest) is not None or self.cpu_cache.find(digest) is not None
            )
            match = self._found(hashes, farther)
            if self._costs.swap_in(len(match.host)) < self._costs.recompute((farther - end) * self.block_size):
                return match
        return self._found(hashes, end)

    def _window_end(self, hashes: list[bytes], has: Callable[[bytes], bool]) -> int:
        """The most leading blocks of which all are there that what follows them can see."""
        end = first = len(hashes)  # blocks first..end are there
        while first > self.window.first_block(end * self.block_size):
            first -= 1
            if not has(hashes[first]):
                end = first
        return end

    def _found(self, hashes: list[bytes], end: int) -> Match:
        """The match of `end` leading blocks, of which the last window is there."""
        first = self.window.first_block(end * self.block_size)
        blocks = [self.cache.find(digest) for digest in hashes[first:end]]
        found = (
            self.cpu_cache.find(digest)
            for digest, block in zip(hashes[first:end], blocks, strict=True)
            if block is None
        )
        return Match(blocks, [host for host in found if host is not None], first)

    def register(self, seq: Sequence, num_tokens: int) -> None:
        """Make the full blocks among the first num_tokens tokens (ids known, KV written or scheduled) findable."""
        full = num_tokens // self.block_size
        self.cache.extend(seq.block_hashes, seq.group.root_hash, seq.token_ids, full)
        first = seq.first_block
        for i in range(max(seq.num_registered, first), full):
            self.cache.register(seq.block_hashes[i], seq.block_table[i - first])
        seq.num_registered = full
        seq.next_full = (full + 1) * self.block_size

    def _demote(self, block: int, digest: bytes) -> None:
        """Keep on the host what a device block holds that is about to be reused."""
        self._await_write_backs = max(self._await_write_backs, self._write_ahead.reuse(block))
        host_block = self.cpu_cache.find(digest)
        if host_block is not None:
            self.cpu.touch(host_block)
        elif self.cpu.num_free:
            (host_block,) = self.cpu.allocate(1)
            self.cpu_cache.register(digest, host_block)
            self.cpu.release([host_block])
            self._swap_outs[host_block] = block

    # ---------------------------------------------------------------------------------------------- admission

    def num_free_after(self, match: Match) -> int:
        """Device blocks that would be free if what a match found were claimed."""
        return self.gpu.num_free_after(match.on_device) - len(match.host)

    def num_shared(self, match: Match) -> int:
        """Leading blocks of a match that somebody holds."""
        for i, block in enumerate(match.blocks):
            if block is None or not self.gpu.is_held(block):
                return i
        return len(match.blocks)

    def claim(self, seq: Sequence, match: Match, num_tokens: int) -> tuple[list[int], bool]:
        """Device blocks from match.first on, for num_tokens tokens, that begin with a match; the caller holds them.

        Also returns whether the plan in the making fills any of these blocks, so that only later ones should read them.
        """
        self.gpu.acquire(match.on_device)
        if match.host:
            self.cpu.acquire(match.host)
            self._reading += match.host
        missing = max(0, self.gpu.blocks_for(num_tokens) - match.end)
        fresh = self.gpu.allocate(len(match.host) + missing)
        incoming = zip(match.host, fresh, strict=False)
        full = self._num_hashed(seq, match)
        table: list[int] = []
        for i, found in enumerate(match.blocks):
            if found is not None:
                table.append(found)
                continue
            host_block, block = next(incoming)
            self._swap_ins.append((host_block, block))
            self._arriving.add(block)
            if i < full:
                self.cache.register(seq.block_hashes[match.first + i], block)
            table.append(block)
        table += fresh[len(match.host) :]
        return table, not self._arriving.isdisjoint(table)

    def _num_hashed(self, seq: Sequence, match: Match) -> int:
        """How many leading blocks of a match are full, so that their hashes say what they hold."""
        if not self.caching:
            return 0
        return seq.num_swapped // self.block_size - match.first if seq.num_swapped else len(match.blocks)

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
            seq.num_shared = max(0, seq.num_shared - count)

    # ---------------------------------------------------------------------------------------------- swapped sequences

    def swap_out_needs(self, seq: Sequence) -> int | None:
        """Blocks to move to swap a running sequence out; None if the host pool has no room for them."""
        found = self._on_host(seq)
        missing = found.count(None)
        held = [block for block in found if block is not None]
        return missing if missing <= self.cpu.num_free_after(held) else None

    def swap_out(self, seq: Sequence) -> None:
        """Note the moves that bring a running sequence's KV to the host pool, and let the sequence hold it there.

        Blocks behind the window have to be dropped before. The device blocks may be released at once. There must be
        room: see `swap_out_needs`.
        """
        found = self._on_host(seq)
        self.cpu.acquire(block for block in found if block is not None)
        fresh = iter(self.cpu.allocate(found.count(None)))
        hashed = seq.num_registered if self.caching else 0
        seq.num_swapped = seq.num_computed
        for i, host_block in enumerate(found):
            if host_block is None:
                host_block = next(fresh)
                self._swap_outs[host_block] = seq.block_table[i]
                if seq.first_block + i < hashed:
                    self.cpu_cache.register(seq.block_hashes[seq.first_block + i], host_block)
            seq.cpu_table.append(host_block)

    def match_swapped(self, seq: Sequence) -> Match:
        """Where a swapped sequence's KV is: blocks that the device still has, and the host's for the rest."""
        full = seq.num_swapped // self.block_size if self.caching else 0
        self.cache.extend(seq.block_hashes, seq.group.root_hash, seq.token_ids, full)
        first = self.window.first_block(seq.num_swapped)
        places = range(first, first + len(seq.cpu_table))
        blocks = [self.cache.find(seq.block_hashes[i]) if i < full else None for i in places]
        return Match(blocks, [host for host, block in zip(seq.cpu_table, blocks, strict=True) if block is None], first)

    def release_swapped(self, seq: Sequence) -> None:
        """Let go of a sequence's host blocks, if it has any. Full ones stay findable."""
        self.cpu.release(seq.cpu_table)
        seq.cpu_table = []
        seq.num_swapped = 0

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

    def _on_host(self, seq: Sequence) -> list[int | None]:
        """For each block with computed tokens of a running sequence, the host block of the same content, if any."""
        used = range(seq.first_block, self.gpu.blocks_for(seq.num_computed))
        if not self.caching:
            return [None] * len(used)
        self.cache.extend(seq.block_hashes, seq.group.root_hash, seq.token_ids, seq.num_registered)
        return [self.cpu_cache.find(seq.block_hashes[i]) if i < seq.num_registered else None for i in used]

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
        self._await_write_backs = -1
        self.num_swapped_out += len(swap_outs) + len(write_backs)
        self.num_swapped_in += len(moves.swap_ins)
        self.cpu.release(self._reading)
        self._swap_outs, self._swap_ins, self._arriving, self._reading = {}, [], set(), []
        return moves

    def check_integrity(self, tables: Iterable[list[int]], cpu_tables: Iterable[list[int]]) -> None:
        """Raise AssertionError unless all holders are in these tables, between two plans."""
        self.gpu.check_integrity(tables)
        self.cpu.check_integrity(cpu_tables)
        assert not (self._swap_ins or self._arriving or self._reading), "swap-ins were left out of the last plan"
        for host_block in self._swap_outs:
            assert 0 <= host_block < self.cpu.num_blocks, f"host block {host_block} does not exist"


def _tier_pays(costs: KVCosts, block_size: int) -> bool:
    """Whether a block takes less to move out and in, among others, than to compute again."""
    return costs.swap_out_block + costs.swap_in_block < costs.recompute(block_size)
