"""`check_scheduler`: every record of a scheduler against every other, for tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rayllm.core.sequence import Sequence, SequenceGroup, SequenceStatus

if TYPE_CHECKING:
    from rayllm.core.scheduler import Scheduler


def check_scheduler(scheduler: Scheduler) -> None:
    """Raise AssertionError at the first contradiction between queues, rows, blocks, sequences and steps in flight."""
    running, forks, swapped = scheduler.running, scheduler.forks, list(scheduler.swapped)
    live = [seq for group in scheduler.groups.values() for seq in group.sequences]
    scheduler.memory.check_integrity(
        [seq.block_table for seq in (*running, *forks)], [seq.cpu_table for seq in live if seq.cpu_table]
    )
    scheduler.batch.check_integrity()
    assert not scheduler.beams.due, "a choice was put off"
    in_flight = [id(seq) for step in scheduler.in_flight for seq in (*step.sampled, *step.pooled)]
    for seq in live:
        _check_place(scheduler, seq)
        _check_counts(scheduler, seq, in_flight.count(id(seq)))
    unfinished = sum(seq.status is not SequenceStatus.FINISHED for seq in live)
    unforked = sum(len(group.siblings) for group in scheduler.groups.values())
    aside = sum(seq.awaits_choice and seq.status is not SequenceStatus.RUNNING for seq in live)
    placed = len(running) + len(scheduler.waiting) + len(swapped) + len(forks) + unforked + aside
    assert placed == unfinished, f"{unfinished} sequences live, {placed} are in a queue"
    for group in scheduler.groups.values():
        _check_beams(group)


def _check_beams(group: SequenceGroup) -> None:
    beams = group.sequences
    assert all((seq.beam is None) == (group.search is None) for seq in beams), f"beams or not: {group.request_id}"
    if group.search is None:
        return
    assert 0 < len(beams) <= group.search.width >= len(group.search.finished), f"too many: {group.request_id}"
    assert not all(seq.awaits_choice for seq in beams), f"a choice is due: {group.request_id}"
    assert len({len(seq.token_ids) for seq in beams}) == 1, f"beams of several lengths: {group.request_id}"
    assert len({seq.index for seq in beams}) == len(beams) == len({tuple(seq.token_ids) for seq in beams})
    sums = [seq.beam.cumulative for seq in beams if seq.beam is not None]
    assert sums == sorted(sums, reverse=True), f"beams are out of order: {group.request_id}"


def _check_place(scheduler: Scheduler, seq: Sequence) -> None:
    waits = seq in scheduler.waiting or any(seq is sibling for sibling in seq.group.siblings)
    if seq.awaits_choice and seq.status is not SequenceStatus.RUNNING:
        assert not waits and seq not in scheduler.swapped, f"nothing is left to compute, but it waits: {seq}"
        assert seq.status in (SequenceStatus.WAITING, SequenceStatus.SWAPPED), f"aside in a wrong state: {seq}"
        return
    places = (seq in scheduler.running, waits, seq in scheduler.forks, seq in scheduler.swapped)
    status = seq.status
    expected = (
        status is SequenceStatus.RUNNING,
        status is SequenceStatus.WAITING,
        status is SequenceStatus.FORKED,
        status is SequenceStatus.SWAPPED,
    )
    assert places == expected, f"in the wrong queue: {seq}"


def _check_counts(scheduler: Scheduler, seq: Sequence, in_flight: int) -> None:
    size = scheduler.blocks.block_size
    assert seq.num_pending == in_flight + seq.awaits_choice, f"{in_flight} of its tokens are in flight: {seq}"
    length = len(seq.token_ids) + seq.num_pending
    assert length <= seq.max_len, f"too long: {seq}"
    if seq.beam is not None:
        assert seq.blocked == (seq.num_pending == 1), f"wrongly blocked or not: {seq}"
    elif seq.constraint is None:
        assert not seq.blocked, f"blocked without a constraint: {seq}"
    elif seq.status is not SequenceStatus.FINISHED:
        awaited = seq in scheduler.awaited_masks
        assert seq.num_pending <= 1, f"constrained, but {seq.num_pending} of its tokens are in flight: {seq}"
        assert seq.blocked == (awaited or seq.num_pending == 1), f"wrongly blocked or not: {seq}"
        assert seq.blocked or seq.constraint.mask() is not None, f"not blocked, but without a mask: {seq}"
    plain = seq.beam is None and seq.constraint is None and seq.status is SequenceStatus.RUNNING
    most = seq.max_len - 1 if plain else 0
    assert seq.steady_computed <= (min(most, seq.capacity) if seq.decoding else 0), f"decodes without a look: {seq}"
    assert seq.steady_known <= (0 if seq.fresh else min(most, seq.next_full)), f"takes tokens without a look: {seq}"
    window = scheduler.memory.window
    swapped = scheduler.blocks.blocks_for(seq.num_swapped) - window.first_block(seq.num_swapped)
    assert len(seq.cpu_table) == swapped, f"wrong number of host blocks: {seq}"
    assert (seq.num_swapped > 0) == (seq.status is SequenceStatus.SWAPPED), f"swapped or not: {seq}"
    if seq.status is not SequenceStatus.RUNNING:
        assert seq.row == -1 and seq.num_computed == 0, f"computed but not running: {seq}"
        return
    assert seq.capacity == (seq.first_block + len(seq.block_table)) * size, f"capacity is wrong: {seq}"
    assert seq.first_block <= window.first_block(seq.num_computed), f"a block that it needs is gone: {seq}"
    assert 0 <= seq.num_shared <= len(seq.block_table), f"shares blocks that it does not hold: {seq}"
    assert seq.num_computed <= seq.capacity, f"computed beyond its blocks: {seq}"
    if seq.decoding:
        assert seq.num_computed == length - 1, f"decoding, but not one token behind: {seq}"
    else:
        assert seq.num_computed < length and not seq.num_pending, f"in its prompt, but nothing is left of it: {seq}"
    if seq.num_computed < seq.capacity:
        block = seq.block_table[seq.num_computed // size - seq.first_block]
        if any(fork.block_table[-1] == block for fork in scheduler.forks):
            return  # the next plan copies it for the siblings before it writes
        assert not scheduler.blocks.needs_copy(block), f"the next write would change a shared block: {seq}"
