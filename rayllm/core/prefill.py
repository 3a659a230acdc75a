"""Scheduling of a sequence that isn't decoding: its chunks, and the siblings that share its prompt."""

from __future__ import annotations

from rayllm.core.kv_memory import KVMemory
from rayllm.core.sequence import Sequence, SequenceStatus
from rayllm.core.step import Draft


def schedule_chunk(seq: Sequence, memory: KVMemory, draft: Draft) -> None:
    """Compute the next tokens of a sequence that isn't decoding; all its ids are known and its blocks are there."""
    uncomputed = len(seq.token_ids) - seq.num_computed
    count = min(draft.budget, uncomputed)
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


def _fork_siblings(parent: Sequence, memory: KVMemory, draft: Draft) -> None:
    """Let the rest of the group hold the prompt's blocks, to enter the batch in the next step.

    A sibling computes the prompt's last token once more, in its own copy of the last block, and samples
    from it with its own noise: to the workers a forked sequence is like any other.
    """
    group = parent.group
    prompt_blocks = memory.gpu.blocks_for(len(group.prompt_token_ids))
    for seq in group.siblings:
        seq.status = SequenceStatus.FORKED
        seq.block_table = memory.gpu.fork(parent.block_table[:prompt_blocks])
        draft.forked.append(seq)
    group.siblings = []
