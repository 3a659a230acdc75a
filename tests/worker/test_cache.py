"""`CopyStream` without a GPU: streams are simulated, and run in any order that their events leave open."""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable

import pytest
import torch

from rayllm.worker import cache
from rayllm.worker.cache import CopyStream, runs, slot_blocks, staging_blocks
from rayllm_kernels import ops

GPU_BLOCKS, CPU_BLOCKS, SLOT = 12, 9, 2


class Device:
    """Streams with queues of work; `run` takes from them at random, as far as events allow."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.streams: list[Stream] = []
        self.current = Stream(self)

    def enqueue(self, work: Callable[[], object]) -> None:
        self.current.queue.append(work)

    def run(self, most: int | None = None) -> None:
        count = 0
        while most is None or count < most:
            ready = [stream for stream in self.streams if stream.queue and not stream.waits()]
            if not ready:
                assert not any(stream.queue for stream in self.streams) or most is not None, "streams wait for ever"
                return
            work = self.rng.choice(ready).queue.popleft()
            if callable(work):
                work()
            count += 1


class Stream:
    def __init__(self, device: Device):
        self.device = device
        self.queue: deque[Callable[[], object] | list[bool]] = deque()  # work, or the mark of an event
        device.streams.append(self)

    def waits(self) -> bool:
        return isinstance(self.queue[0], list) and not self.queue[0][0]

    def wait_event(self, event: Event) -> None:
        if event.mark is not None:
            self.queue.append(event.mark)

    def synchronize(self) -> None:
        self.device.run()


class Event:
    """What is waited for is the last record before the wait, as on CUDA."""

    mark: list[bool] | None = None

    def record(self, stream: Stream) -> None:
        self.mark = mark = [False]
        stream.queue.append(lambda: mark.__setitem__(0, True))


@pytest.fixture(params=range(40))
def device(request, monkeypatch) -> Device:
    device = Device(random.Random(request.param))

    class Deferred(torch.Tensor):
        """A tensor that is copied to when the current stream gets there."""

        def copy_(self, source, non_blocking=False):
            assert non_blocking, "the host would wait"
            target = self.as_subclass(torch.Tensor)
            device.enqueue(lambda: target.copy_(source.as_subclass(torch.Tensor)))
            return self

    @contextlib.contextmanager
    def stream(entered):
        before, device.current = device.current, entered
        yield
        device.current = before

    def copy_blocks(pool, source, destination):
        assert not set(source.tolist()) & set(destination.tolist())
        device.enqueue(lambda: ops.copy_blocks(pool.as_subclass(torch.Tensor), source, destination))

    monkeypatch.setattr(torch.cuda, "Stream", lambda _device: Stream(device))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: device.current)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(cache, "ops", type("Ops", (), {"copy_blocks": staticmethod(copy_blocks)}))
    monkeypatch.setattr(cache, "SLOT_BYTES", SLOT * 16)
    device.tensor = lambda *shape: torch.zeros(*shape).as_subclass(Deferred)
    return device


def test_every_order_that_events_allow_is_the_programs(device):
    rng = device.rng
    staging = staging_blocks(16, CPU_BLOCKS)
    assert staging == 5 * SLOT
    pool, host = device.tensor(GPU_BLOCKS + staging, 4), device.tensor(CPU_BLOCKS, 4)
    copies = CopyStream(pool, host, staging)
    raw = pool.as_subclass(torch.Tensor)
    expected_pool, expected_host = [0.0] * GPU_BLOCKS, [0.0] * CPU_BLOCKS
    arriving: set[int] = set()
    leaving: dict[int, int] = {}  # block -> step of its last write-back
    checks = []

    def write(block: int, value: float) -> None:
        device.enqueue(lambda: raw[block].fill_(value))
        expected_pool[block] = value

    def read(block: int) -> None:
        expected = expected_pool[block]
        device.enqueue(lambda: checks.append((raw[block].unique().tolist(), [expected])))

    value = 0.0
    for step in range(200):
        free = [block for block in range(GPU_BLOCKS) if block not in arriving]
        writable = [block for block in free if block not in leaving]
        action = rng.choice(["write", "write", "read", "out", "in", "join", "back", "join back"])
        if action == "write":
            for block in rng.sample(writable, min(len(writable), 3)):
                value += 1.0
                write(block, value)
        elif action == "read":
            for block in free:
                read(block)
        elif action == "out":
            count = rng.randint(1, min(len(free), CPU_BLOCKS)) if free else 0
            pairs = list(zip(rng.sample(free, count), rng.sample(range(CPU_BLOCKS), count), strict=True))
            if pairs:
                copies.swap_out(pairs)
            for block, host_block in pairs:
                expected_host[host_block] = expected_pool[block]
        elif action == "in":
            count = rng.randint(0, min(len(writable), CPU_BLOCKS))
            pairs = list(zip(rng.sample(range(CPU_BLOCKS), count), rng.sample(writable, count), strict=True))
            if pairs:
                copies.swap_in(pairs)
            for host_block, block in pairs:
                expected_pool[block] = expected_host[host_block]
                arriving.add(block)
        elif action == "back":
            count = rng.randint(0, min(len(free), CPU_BLOCKS))
            pairs = list(zip(rng.sample(free, count), rng.sample(range(CPU_BLOCKS), count), strict=True))
            copies.write_back(pairs, step)
            for block, host_block in pairs:
                expected_host[host_block] = expected_pool[block]
                leaving[block] = step
        elif action == "join back":
            done = rng.randint(step // 2, step)
            copies.join_write_backs(done)
            leaving = {block: last for block, last in leaving.items() if last > done}
        else:
            copies.join_swap_ins()
            arriving.clear()
        device.run(rng.randint(0, 12))
    copies.join_swap_ins()
    for block in range(GPU_BLOCKS):
        read(block)
    copies.synchronize()
    assert all(got == expected for got, expected in checks) and len(checks) >= GPU_BLOCKS
    assert host.as_subclass(torch.Tensor)[:, 0].tolist() == expected_host


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [([7], [(0, 7, 1)]), ([3, 4, 5], [(0, 3, 3)]), ([0, 2, 3, 9], [(0, 0, 1), (1, 2, 2), (3, 9, 1)])],
)
def test_consecutive_blocks_are_one_transfer(blocks, expected):
    assert runs(blocks) == expected


def test_slots_are_bounded_by_their_size_and_the_host_pool():
    mib = 1 << 20
    assert slot_blocks(2 * mib, 4000) == 32
    assert slot_blocks(200 * mib, 4000) == 1
    assert slot_blocks(64, 10**9) == 32768
    assert slot_blocks(2 * mib, 5) == 5
    assert staging_blocks(2 * mib, 0) == 0
