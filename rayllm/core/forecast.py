"""`Forecast`: whether the running sequences will have enough blocks, if each gets as long as expected.

All decoding sequences grow by a token a step, and how many steps each has left is known (a request that ignores
end-of-sequence reaches its limit) or expected (`OutputLengths`). A sequence of m tokens in the pool needs
ceil((m + t) / block_size) blocks t steps from now, and none after its last step. So the need falls only where a
sequence ends, its peak is at one of these steps, and a walk over the ends in order finds it, exactly to the block. The
sum of the rounded-up quotients comes from a count of the sequences by m modulo the block size.

Where this is not exact it is cautious: sequences count as growing until the result of their last step is there, which
with steps in flight is a step too long; and as many blocks as have several holders count as held to the end, because
who lets go of them last is not followed up. Only prompts that are computed beside many others may take longer than it
takes them for.
"""

from __future__ import annotations

import sys

from rayllm.core.batch import RunningBatch
from rayllm.core.kv_memory import KVMemory
from rayllm.core.output_lengths import OutputLengths
from rayllm.core.sequence import Sequence

# What changes at a step: a sequence ends, or its sliding window is full. (step, base and residue of the sequence, which
# stops growing, as `Need` has them, or residue -1 if it did not grow any more; blocks to be added to those that
# sequences with a full window have grown by; blocks that are let go)
Event = tuple[int, int, int, int, int]


class Need:
    """Blocks that sequences will need beyond those that they hold now, as a function of time.

    A sequence of m tokens that holds h blocks needs (m + t + size - 1) // size - h more at step t. With
    m + size - 1 = size * q + s this is base + t // size, and one more if s + t % size >= size, where base = q - h.
    """

    def __init__(self, block_size: int):
        self._size = block_size
        self._events: list[Event] = []
        self._counts = [0] * block_size  # of the growing sequences by s
        self._growing = self._base = self._full = 0
        self._total = 0  # if nobody ever ended

    def add(self, tokens: int, steps: int, first: int, held: int, own: int, most: int) -> None:
        """A sequence with `tokens` tokens in the pool that ends after `steps` steps.

        first, held: it holds so many blocks from that one on. own: those that nobody else holds. most: blocks that it
        holds at once at most, at least `held`; so many at once if it does not grow token by token.
        """
        full_at = (first + most - 1) * self._size + 1 - tokens
        if full_at <= 0:
            self._full += most - held
            self._total += most - held
        elif full_at < steps:
            self.add_growing(tokens, full_at, first + held, 0)
            step, base, residue, _full, _own = self._events[-1]
            self._events[-1] = (step, base, residue, most - held, 0)
        else:
            self.add_growing(tokens, steps, first + held, own)
            return
        self._events.append((steps, 0, -1, held - most, own))

    def add_growing(self, tokens: int, steps: int, end: int, own: int) -> None:
        """A sequence that grows by a token a step to its end. end: of the blocks that it holds."""
        quotient, residue = divmod(tokens + self._size - 1, self._size)
        base = quotient - end
        self._growing += 1
        self._base += base
        self._counts[residue] += 1
        self._total += base + (steps + residue) // self._size
        self._events.append((steps, base, residue, 0, own))

    def steps_to_fit(self, room: int, kept: int) -> int:
        """0 if it never exceeds `room` blocks; otherwise steps before which the last one added does not fit either.

        kept: of the blocks let go, so many stay in use. The later it enters, the fewer blocks it has at the step at
        which there are too few: one less every block_size steps. And once that step has passed, it is no obstacle. As
        needs are estimated with some caution, block_size steps are the most.
        """
        if self._total <= room:
            return 0
        self._events.sort()
        size, counts = self._size, self._counts.copy()
        growing, need, freed, last = self._growing, self._base + self._full, -kept, -1
        for step, base, residue, full, own in self._events:
            if step != last:
                last = step
                turns, rest = divmod(step, size)
                level = need + growing * turns - (freed if freed > 0 else 0)
                if level + growing > room:
                    missing = level + sum(counts[size - rest :]) - room
                    if missing > 0:
                        return min(step + 1, (missing - 1) * size + 1, size)
            if residue >= 0:
                growing -= 1
                need -= base
                counts[residue] -= 1
            need += full
            freed += own
        return 0


class Forecast:
    """Says for `Admission` whether a sequence may enter. lengths: of outputs that ended by themselves.

    longest_chunk: tokens of a prompt that a step computes at most.
    """

    def __init__(self, memory: KVMemory, batch: RunningBatch, longest_chunk: int):
        self._memory, self._batch = memory, batch
        self._chunk_blocks = memory.gpu.blocks_for(longest_chunk)
        self._window_blocks = memory.window.most_blocks(sys.maxsize)  # without a window, more than there can be
        self.lengths = OutputLengths()
        self._need: Need | None = None
        self._refused: Sequence | None = None
        self._looks_to_skip = 0
        self._longest_chunk = longest_chunk
        self._lag = 0

    def start_step(self, in_flight: int) -> None:
        """The running sequences have advanced. in_flight: steps whose results are not known yet."""
        self._need = None
        self._lag = in_flight

    def ended(self, seq: Sequence) -> None:
        """A sequence has ended, or its request: learn from its length, unless it was known."""
        if len(seq.token_ids) < seq.expected_len:
            self._refused = None  # there is more room than was foreseen
        generated = len(seq.token_ids) - len(seq.group.prompt_token_ids)
        if generated > 0 and seq.beam is None and not _reaches_limit(seq):  # beams die at any length
            self.lengths.add(generated)

    def fits(self, seq: Sequence, held: int, shared: int, room: int) -> bool:
        """Whether nobody will lack a block if a sequence enters now, as it then has to.

        held: blocks it is going to hold at first; shared: those of them that others hold. room: free blocks after that.
        One that was refused is looked at again when that can make a difference.
        """
        if self._refused is seq and self._looks_to_skip:
            self._looks_to_skip -= 1
            return False
        need = self._need or self._of_running()
        length = len(seq.token_ids)
        seq.expected_len = 0  # by what is known now
        first = max(0, self._memory.gpu.blocks_for(length) - held)
        most = max(held, self._window_blocks)
        # It samples its first token in this step already, if its prompt ends in it.
        need.add(length, self._steps_left(seq, length), first, held, held - shared, most)
        wait = need.steps_to_fit(room, self._memory.gpu.num_shared + shared)
        if not wait:
            self._need = need
            return True
        self._need = None
        self._refused, self._looks_to_skip = seq, wait - 1
        return False

    def _of_running(self) -> Need:
        need = Need(self._memory.block_size)
        windowed = self._memory.window.tokens is not None
        for seq in self._batch.sequences:  # written for speed, as there may be many
            length = len(seq.token_ids) + seq.num_pending
            steps = seq.expected_len - length + self._lag
            if steps <= self._lag or not seq.decoding:
                steps = self._steps_left(seq, length)
            held = len(seq.block_table)
            if windowed:
                need.add(length - 1, steps, seq.first_block, held, held - seq.num_shared, self._most(seq, length))
            else:
                need.add_growing(length - 1, steps, held, held - seq.num_shared)
        return need

    def _most(self, seq: Sequence, length: int) -> int:
        """Blocks that a running sequence holds at once at most, with a sliding window."""
        most = max(len(seq.block_table), self._window_blocks)
        if seq.decoding:
            return most
        prompt = self._memory.gpu.blocks_for(length) - seq.first_block
        return max(most, min(prompt, self._window_blocks + self._chunk_blocks))

    def _steps_left(self, seq: Sequence, length: int) -> int:
        if seq.expected_len <= length < seq.max_len:  # not looked at before, or longer than expected
            prompt = len(seq.group.prompt_token_ids)
            limit = seq.max_len - prompt
            seq.length_share = seq.length_share or self.lengths.next_share()
            seq.expected_len = prompt + (
                limit if _reaches_limit(seq) else self.lengths.expected(length - prompt, limit, seq.length_share)
            )
        steps = max(0, seq.expected_len - length) + self._lag
        return steps if seq.decoding else steps + (length - seq.num_computed) // self._longest_chunk


def _reaches_limit(seq: Sequence) -> bool:
    """Whether a sequence surely gets as long as it may."""
    return not (seq.stop_ids or seq.group.params.stop or seq.constraint)
