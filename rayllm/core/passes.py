"""The passes of a step over sequences in the batch: one more token for those that decode, chunks for the others."""

from __future__ import annotations

from rayllm.core.memory import KVMemory
from rayllm.core.preemption import Preemption
from rayllm.core.sequence import Sequence
from rayllm.core.state import SchedulerState
from rayllm.core.step import Draft


def schedule_decodes(state: SchedulerState, preemption: Preemption, draft: Draft) -> list[Sequence]:
    """Advance every decoding sequence by one token. Returns the running ones that are still in their prompt.

    Sequences come in policy order, and preemption takes them from the end, which ends the loop early. This loop runs
    over all running sequences in every step: it is written for speed.
    """
    prefilling: list[Sequence] = []
    budget, add = draft.budget, draft.decodes.append
    for seq in state.batch.sequences:
        computed = seq.num_computed
        if computed >= seq.steady_computed or not budget:
            if not seq.decoding:
                if computed >= seq.capacity and not _grow(seq, state, preemption, draft):
                    break  # as below; only where a sliding window lets a prompt begin without all of its blocks
                prefilling.append(seq)
                continue
            if seq.closed or computed + 1 >= seq.max_len:
                continue  # its next mask or token is not known, or a step in flight samples its last token
            if not budget:
                break
            if computed >= seq.capacity and not _grow(seq, state, preemption, draft):
                break  # the last in order, it was preempted itself
            if seq.gate is not None:
                draft.close_gate(seq)
            else:
                seq.steady_computed = min(seq.capacity, seq.max_len - 1)
        budget -= 1
        seq.num_computed = computed + 1
        seq.num_pending += 1
        add(seq)
    draft.budget = budget
    return prefilling


def _grow(seq: Sequence, state: SchedulerState, preemption: Preemption, draft: Draft) -> bool:
    """Give a sequence one more block, preempting from the end of the order. False if it had to go itself."""
    memory = state.memory
    memory.drop_behind(seq)
    while not memory.gpu.num_free:
        if state.forks:
            state.send_back(state.forks.pop())
        elif preemption.preempt_last() is seq:
            return False
    index = seq.first_block + len(seq.block_table)
    draft.block_updates.append((seq.row, index, memory.extend_table(seq, 1)))
    return True


def schedule_chunk(seq: Sequence, memory: KVMemory, draft: Draft) -> None:
    """Compute the next tokens of a sequence that isn't decoding; all its ids are known and blocks for one are there."""
    uncomputed = len(seq.token_ids) - seq.num_computed
    count = min(draft.budget, uncomputed)
    if draft.chunks is not None and uncomputed > 1:  # a single token is as a decode
        count = draft.chunks.grant(seq.num_computed, count)
        if not count:
            draft.budget = 0  # time is up for this step
            return
    count = _find_blocks(seq, count, memory, draft)
    draft.budget -= count
    seq.num_computed += count
    if seq.next_full <= seq.num_computed:
        memory.register(seq, seq.num_computed)
    if count < uncomputed:
        draft.partial.append((seq, count))
        return
    seq.decoding = True
    seq.num_pending += 1
    if seq.group.pooling is not None:
        draft.partial.append((seq, count))
        draft.pooled.append(seq)
        return
    if count == 1:
        draft.decodes.append(seq)
    else:
        draft.ending.append((seq, count))
    if seq.gate is not None:
        draft.close_gate(seq)
    if seq.group.siblings:
        _fork_siblings(seq, memory, draft)


def _find_blocks(seq: Sequence, count: int, memory: KVMemory, draft: Draft) -> int:
    """Make the sequence's table reach over its next `count` tokens. Returns for how many of them there are blocks.

    Only with a sliding window is there anything to do: otherwise a prompt has all of its blocks from its admission on.
    """
    if seq.num_computed + count > seq.capacity:
        memory.drop_behind(seq)
        begin = seq.first_block + len(seq.block_table)
        missing = min(memory.gpu.blocks_for(seq.num_computed + count) - begin, memory.gpu.num_free)
        if missing:
            draft.block_updates.append((seq.row, begin, memory.extend_table(seq, missing)))
    return min(count, seq.capacity - seq.num_computed)


def _fork_siblings(parent: Sequence, memory: KVMemory, draft: Draft) -> None:
    """Let the rest of the group hold the prompt's blocks, to enter the batch in the next step.

    A sibling computes the prompt's last token once more, in its own copy of the last block, and samples
    from it with its own noise: to the workers a forked sequence is like any other.
    """
    group = parent.group
    prompt_blocks = memory.gpu.blocks_for(len(group.prompt_token_ids)) - parent.first_block
    for seq in group.siblings:
        seq.fork_from(parent, memory.gpu.fork(parent.block_table[:prompt_blocks]))
        draft.forked.append(seq)
    group.siblings = []
