"""Scheduling of a sequence that isn't decoding: its chunks, and the siblings that share its prompt."""

from __future__ import annotations

from rayllm.core.kv_memory import KVMemory
from rayllm.core.sequence import Sequence, SequenceStatus
from rayllm.core.step import Draft


def schedule_chunk(seq: Sequence, memory: KVMemory, draft: Draft) -> None:
    """Compute the next tokens of a sequence that isn't decoding; all its ids are known and blocks for one are there."""
    uncomputed = len(seq.token_ids) - seq.num_computed
    count = min(draft.budget, uncomputed)
    if draft.pace is not None and uncomputed > 1:  # a single token is as a decode
        count = draft.pace.take(seq.num_computed, count)
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
    if seq.constraint is not None:
        draft.constrain(seq)
    elif seq.beam is not None:
        seq.blocked = True
    if seq.group.siblings:
        _fork_siblings(seq, memory, draft)


def _find_blocks(seq: Sequence, count: int, memory: KVMemory, draft: Draft) -> int:
    """Make the sequence's table reach over its next `count` tokens. Returns for how many of them there are blocks.

    Only with a sliding window there is something to do: otherwise a prompt has all of its blocks from its admission on.
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
        seq.status = SequenceStatus.FORKED
        seq.block_table = memory.gpu.fork(parent.block_table[:prompt_blocks])
        seq.first_block = parent.first_block
        seq.num_shared = prompt_blocks - 1
        draft.forked.append(seq)
    group.siblings = []
