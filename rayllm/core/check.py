"""`check_scheduler`: every record of a scheduler against every other. Tests call it after every operation."""

from __future__ import annotations

from rayllm.core.scheduler import Scheduler
from rayllm.core.sequence import Sequence, SequenceGroup, SequenceStatus, policy_order
from rayllm.core.state import SchedulerState

WAITING, FORKED = SequenceStatus.WAITING, SequenceStatus.FORKED
RUNNING, FINISHED = SequenceStatus.RUNNING, SequenceStatus.FINISHED


def check_scheduler(scheduler: Scheduler) -> None:
    """Raise AssertionError at the first contradiction between queues, rows, blocks, sequences and steps in flight."""
    state = scheduler.state
    running, forks = state.running, state.forks
    live = [seq for group in state.groups.values() for seq in group.sequences]
    state.memory.check_integrity((*running, *forks), [seq.pinned for seq in live if seq.pinned])
    assert state.memory.num_swapped == sum(bool(seq.pinned) for seq in live), "swapped sequences are counted wrongly"
    state.adapters.check_integrity([seq.group.adapter for seq in running if seq.group.adapter is not None])
    rows = [seq.row for seq in running]
    assert sorted(rows + state.free_rows) == list(range(state.max_num_seqs)), "rows are lost or held twice"
    for queue in (running, state.waiting):
        assert queue == sorted(queue, key=policy_order), "sequences are out of order"
    in_flight = [id(seq) for step in scheduler.in_flight for seq in (*step.sampled, *step.pooled)]
    for seq in live:
        _check_place(state, seq)
        _check_counts(state, seq, in_flight.count(id(seq)))
    unfinished = sum(seq.status is not FINISHED for seq in live)
    unforked = sum(len(group.siblings) for group in state.groups.values())
    aside = sum(seq.awaits_choice and seq.status is not RUNNING for seq in live)
    placed = len(running) + len(state.waiting) + len(forks) + unforked + aside
    assert placed == unfinished, f"{unfinished} sequences live, {placed} are in a queue"
    for group in state.groups.values():
        assert not group.finished, f"over, but not forgotten: {group.request.request_id}"
        assert group.siblings in ([], group.sequences[1:]), f"nobody computes the prompt: {group.request.request_id}"
        _check_beams(group)


def _check_beams(group: SequenceGroup) -> None:
    name = group.request.request_id
    beams = [seq.gate.beam for seq in group.sequences if seq.gate is not None and seq.gate.beam is not None]
    assert len(beams) == (0 if group.search is None else len(group.sequences)), f"beams or not: {name}"
    if group.search is None:
        return
    sequences = group.sequences
    assert 0 < len(beams) <= group.request.params.width >= len(group.search.finished), f"too many: {name}"
    assert not all(seq.awaits_choice for seq in sequences), f"a choice is due: {name}"
    assert len({len(seq.token_ids) for seq in sequences}) == 1, f"beams of several lengths: {name}"
    assert len({seq.index for seq in sequences}) == len(beams), f"two beams of one index: {name}"
    assert len({tuple(seq.token_ids) for seq in sequences}) == len(beams), f"two equal beams: {name}"
    sums = [beam.cumulative for beam in beams]
    assert sums == sorted(sums, reverse=True), f"beams are out of order: {name}"


def _check_place(state: SchedulerState, seq: Sequence) -> None:
    waits = seq in state.waiting or any(seq is sibling for sibling in seq.group.siblings)
    if seq.awaits_choice and seq.status is not RUNNING:
        assert not waits, f"nothing is left to compute, but it waits: {seq}"
        assert seq.status is WAITING, f"aside in a wrong state: {seq}"
        return
    places = (seq in state.running, waits, seq in state.forks)
    expected = (seq.status is RUNNING, seq.status is WAITING, seq.status is FORKED)
    assert places == expected, f"in the wrong queue: {seq}"


def _check_counts(state: SchedulerState, seq: Sequence, in_flight: int) -> None:
    memory = state.memory
    assert seq.num_pending == in_flight + seq.awaits_choice, f"{in_flight} of its tokens are in flight: {seq}"
    length = len(seq.token_ids) + seq.num_pending
    assert length <= seq.max_len, f"too long: {seq}"
    _check_gate(state, seq)
    most = seq.max_len - 1 if seq.gate is None and seq.status is RUNNING else 0
    assert seq.steady_computed <= (min(most, seq.capacity) if seq.decoding else 0), f"decodes without a look: {seq}"
    known = 0 if seq.group.fresh else min(most, seq.next_full)
    assert seq.steady_known <= known, f"takes tokens without a look: {seq}"
    assert not seq.pinned or seq.status is WAITING, f"swapped out, but not waiting: {seq}"
    assert seq.status in (RUNNING, FORKED) or not seq.block_tables, f"holds blocks: {seq}"
    if seq.status is not RUNNING:
        assert seq.row == -1 and seq.num_computed == 0, f"computed but not running: {seq}"
        return
    for window, first, table in zip(memory.windows, seq.first_blocks, seq.block_tables, strict=True):
        assert seq.capacity == (first + len(table)) * memory.block_size, f"capacity is wrong: {seq}"
        assert first <= window.first_block(seq.num_computed), f"a block that it needs is gone: {seq}"
    assert seq.num_computed <= seq.capacity, f"computed beyond its blocks: {seq}"
    if seq.decoding:
        assert seq.num_computed == length - 1, f"decoding, but not one token behind: {seq}"
    else:
        assert seq.num_computed < length and not seq.num_pending, f"in its prompt, but nothing is left of it: {seq}"
    if seq.num_computed < seq.capacity:
        for group, (first, table) in enumerate(zip(seq.first_blocks, seq.block_tables, strict=True)):
            block = table[seq.num_computed // memory.block_size - first]
            if any(fork.block_tables[group][-1:] == [block] for fork in state.forks):
                continue  # the next plan copies it for the siblings before it writes
            assert not memory.gpu.needs_copy(block), f"the next write would change a shared block: {seq}"


def _check_gate(state: SchedulerState, seq: Sequence) -> None:
    gate = seq.gate
    if gate is None or seq.status is FINISHED:
        return
    assert (gate.beam is None) != (gate.constraint is None), f"a gate for nothing, or for two things: {seq}"
    if gate.constraint is None:
        assert gate.closed == (seq.num_pending == 1), f"wrongly closed or not: {seq}"
        return
    awaited = any(seq is other for other in state.awaiting_mask)
    assert seq.num_pending <= 1, f"constrained, but {seq.num_pending} of its tokens are in flight: {seq}"
    assert gate.closed == (awaited or seq.num_pending == 1), f"wrongly closed or not: {seq}"
    assert gate.closed or gate.constraint.mask() is not None, f"open, but without a mask: {seq}"
