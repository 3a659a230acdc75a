"""`CopyStream`: moves KV blocks between a device and pinned host memory, beside the step that computes.

Blocks are scattered over both pools, and one transfer a block would be too small for PCIe where blocks are. So blocks
go through staging blocks on the device: one kernel gathers them there (or scatters them from there) at the speed of
device memory, and the transfer itself covers as many host blocks as follow one another. The host pool hands blocks out
in such runs as long as it can.

Out: the gather runs on the compute stream, so that a block may be overwritten by whatever that stream does next; the
transfer follows on the copy stream. There are several slots of staging blocks, and compute waits only if all are
still on their way. In: transfer and scatter both run on the copy stream, behind what the compute stream had to do
until then, and compute waits for them when it is told to. Back: what is copied to the host long before its block is
needed is gathered and transferred on the copy stream, and compute goes on. A block that goes out and comes in again is
in order, because all transfers are on one stream.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import torch

from rayllm.worker.inputs import to_device
from rayllm_kernels import ops

SLOT_BYTES = 64 << 20  # a transfer of this size is as fast as any
OUT_SLOTS = 4  # what swap-outs may be behind compute before it waits for them
MAX_SLOT_BLOCKS = 32768  # pairs of one `copy_blocks`


def slot_blocks(block_bytes: int, num_cpu_blocks: int) -> int:
    """Staging blocks of a slot; 0 if there is nothing to move to."""
    return min(num_cpu_blocks, MAX_SLOT_BLOCKS, max(1, SLOT_BYTES // block_bytes))


def staging_blocks(block_bytes: int, num_cpu_blocks: int) -> int:
    """Staging blocks on the device: slots for swap-outs, and one for what the copy stream moves alone."""
    return (OUT_SLOTS + 1) * slot_blocks(block_bytes, num_cpu_blocks)


def runs(blocks: list[int]) -> list[tuple[int, int, int]]:
    """(place in the list, first block, count) of each maximal run of consecutive ids."""
    ids = np.array(blocks)
    starts = np.flatnonzero(np.append(True, ids[1:] != ids[:-1] + 1))
    counts = np.diff(np.append(starts, len(ids)))
    return list(zip(starts.tolist(), ids[starts].tolist(), counts.tolist(), strict=True))


class CopyStream:
    """device: [blocks + staging_blocks, ...], of which the last are the staging blocks. host: [num_cpu_blocks, ...].

    Called with the compute stream current.
    """

    def __init__(self, device: torch.Tensor, host: torch.Tensor, num_staging: int):
        self._device, self._host = device, host
        self._slot_size = num_staging // (OUT_SLOTS + 1)
        first = device.shape[0] - num_staging
        self._out_slots = [first + i * self._slot_size for i in range(OUT_SLOTS)]
        self._own_slot = first + OUT_SLOTS * self._slot_size
        self._stream = torch.cuda.Stream(device.device)
        self._sent = [torch.cuda.Event() for _ in range(OUT_SLOTS)]  # each slot's last transfer
        self._turn = 0
        self._ready = torch.cuda.Event()  # on the compute stream: gathered, or nothing there uses the blocks any more
        self._arrived: torch.cuda.Event | None = None  # the swap-ins that compute has not waited for
        self._written: deque[tuple[int, torch.cuda.Event]] = deque()  # write-backs that it has not, with their steps

    def swap_out(self, pairs: list[tuple[int, int]]) -> None:
        """Start moving (device block, host block) pairs; the device blocks may be overwritten by what follows."""
        compute = torch.cuda.current_stream()
        pairs = sorted(pairs, key=lambda pair: pair[1])
        for begin in range(0, len(pairs), self._slot_size):
            chunk = pairs[begin : begin + self._slot_size]
            slot, sent = self._out_slots[self._turn], self._sent[self._turn]
            self._turn = (self._turn + 1) % OUT_SLOTS
            compute.wait_event(sent)
            self._copy([block for block, _host in chunk], range(slot, slot + len(chunk)))
            self._ready.record(compute)
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(self._ready)
                self._send(slot, chunk)
                sent.record(self._stream)

    def write_back(self, pairs: list[tuple[int, int]], step_id: int) -> None:
        """Start copying (device block, host block) pairs; compute may read the device blocks."""
        self._ready.record(torch.cuda.current_stream())
        pairs = sorted(pairs, key=lambda pair: pair[1])
        slot = self._own_slot
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._ready)
            for begin in range(0, len(pairs), self._slot_size):
                chunk = pairs[begin : begin + self._slot_size]
                self._copy([block for block, _host in chunk], range(slot, slot + len(chunk)))
                self._send(slot, chunk)
            written = torch.cuda.Event()
            written.record(self._stream)
        self._written.append((step_id, written))

    def join_write_backs(self, step_id: int) -> None:
        """Let the compute stream wait for the write-backs of all steps up to this one."""
        last = None
        while self._written and self._written[0][0] <= step_id:
            _step, last = self._written.popleft()
        if last is not None:
            torch.cuda.current_stream().wait_event(last)

    def swap_in(self, pairs: list[tuple[int, int]]) -> None:
        """Start moving (host block, device block) pairs; compute has to `join` before it uses the device blocks."""
        self._ready.record(torch.cuda.current_stream())
        pairs = sorted(pairs)
        slot = self._own_slot
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._ready)
            for begin in range(0, len(pairs), self._slot_size):
                chunk = pairs[begin : begin + self._slot_size]
                for place, block, count in runs([host for host, _block in chunk]):
                    staged = self._device[slot + place : slot + place + count]
                    staged.copy_(self._host[block : block + count], non_blocking=True)
                self._copy(range(slot, slot + len(chunk)), [block for _host, block in chunk])
            self._arrived = torch.cuda.Event()
            self._arrived.record(self._stream)

    def join(self) -> None:
        """Let the compute stream wait for all swap-ins so far."""
        if self._arrived is not None:
            torch.cuda.current_stream().wait_event(self._arrived)
            self._arrived = None

    def _send(self, slot: int, chunk: list[tuple[int, int]]) -> None:
        """Transfer what is staged from `slot` on to the host blocks of (device block, host block) pairs."""
        for place, block, count in runs([host for _block, host in chunk]):
            staged = self._device[slot + place : slot + place + count]
            self._host[block : block + count].copy_(staged, non_blocking=True)

    def synchronize(self) -> None:
        """Wait on the host until everything has moved."""
        self._stream.synchronize()

    def _copy(self, source: list[int] | range, destination: list[int] | range) -> None:
        """Copy blocks on the device, on the current stream."""
        indices = to_device([np.array(source), np.array(destination)], np.int64, self._device.device)
        ops.copy_blocks(self._device, *indices)
