"""All-reduce kernels in Triton's interpreter: ranks are processes that share memory. tests/gpu has the GPUs' tests."""

from __future__ import annotations

import mmap
import multiprocessing
import random
import time
import traceback
from collections.abc import Callable

import pytest
import torch
from support.closeness import check_close
from torch import Tensor

from rayllm_kernels import ops
from rayllm_kernels.ops import PeerBuffers

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="ranks that share one process's GPU may not overlap")

EPS = 1e-5
PROGRAMS, MAX_ROWS, HIDDEN = 3, 24, 40  # rows are padded on chip, several to a program


class Ranks:
    """`size` processes over one piece of shared memory, which forked children see at the same address."""

    def __init__(self, size: int, dtype: torch.dtype):
        self.size, self.dtype = size, dtype
        shape = PeerBuffers(0, size, HIDDEN, dtype, PROGRAMS, MAX_ROWS, torch.empty(0), torch.empty(0))
        self.words = torch.frombuffer(mmap.mmap(-1, 4 * size * shape.num_words), dtype=torch.int32).fill_(-1)
        self._bases = [self.words.data_ptr() + 4 * rank * shape.num_words for rank in range(size)]

    def buffers(self, rank: int):
        peers, uses = torch.tensor(self._bases), torch.zeros(PROGRAMS, dtype=torch.int32)
        return PeerBuffers(rank, self.size, HIDDEN, self.dtype, PROGRAMS, MAX_ROWS, peers, uses)

    def run(self, body: Callable[..., list[Tensor]]) -> list[list[Tensor]]:
        """body(rank, buffers) on every rank; its tensors, by rank."""
        context = multiprocessing.get_context("fork")
        pipes, processes = [], []
        for rank in range(self.size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=self._child, args=(rank, body, sender))
            process.start()
            pipes.append(receiver)
            processes.append(process)
        try:
            results = []
            for pipe in pipes:
                assert pipe.poll(120), "a rank waits for ever"
                results.append(pipe.recv())
        finally:
            for process in processes:
                process.kill()
                process.join()
        for result in results:
            assert not isinstance(result, str), result
        return [[torch.frombuffer(bytearray(raw), dtype=dtype).view(shape) for raw, dtype, shape in r] for r in results]

    def _child(self, rank: int, body: Callable[..., list[Tensor]], sender) -> None:
        torch.set_num_threads(1)
        try:
            tensors = body(rank, self.buffers(rank))
            sender.send([(t.view(torch.uint8).numpy().tobytes(), t.dtype, t.shape) for t in tensors])
        except BaseException:
            sender.send(traceback.format_exc())


def normal(dtype: torch.dtype, seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def part(dtype: torch.dtype, call: int, rank: int, rows: int) -> Tensor:
    return normal(dtype, 100 * call + rank, rows, HIDDEN)


def norm_weight(dtype: torch.dtype, call: int) -> Tensor:
    """In the tokens' dtype, or, of every other call, in fp32."""
    return normal(torch.float32 if call % 2 else dtype, 8000, HIDDEN)


# (kind, rows): kinds and sizes change from call to call, and every size comes three times, so that slots are reused.
CALLS = [
    (kind, rows)
    for _ in range(3)
    for kind, rows in (
        ("one", 1),
        ("two", 7),
        ("plain one", 3),
        ("gather", 5),
        ("two", 23),
        ("one", 6),
        ("plain two", 2),
    )
]


def run_calls(rank: int, buffers) -> list[Tensor]:
    rng, results, dtype = random.Random(rank), [], buffers.dtype
    for call, (kind, rows) in enumerate(CALLS):
        time.sleep(rng.random() * 0.02)
        x, two_shot = part(dtype, call, rank, rows), kind.endswith("two")
        if kind == "gather":
            results += [ops.all_gather_small(torch.arange(rows * 2).view(rows, 2) * (rank - 1), buffers)]
        elif kind.startswith("plain"):
            results += [ops.all_reduce(x, buffers, two_shot=two_shot)]
        else:
            residual, weight = normal(dtype, 7000 + call, rows, HIDDEN), norm_weight(dtype, call)
            results += ops.all_reduce_add_rms_norm(x, residual, weight, EPS, buffers, two_shot=two_shot)
    return results


@pytest.mark.parametrize(("size", "dtype"), [(2, torch.float16), (4, torch.bfloat16)])
def test_calls_of_all_kinds(size, dtype):
    ranks = Ranks(size, dtype)
    results = ranks.run(run_calls)
    for other in results[1:]:
        assert len(other) == len(results[0])
        assert all(torch.equal(a, b) for a, b in zip(other, results[0], strict=True))
    assert bool((ranks.words == -1).all()), "every use empties what it received"
    left = iter(results[0])
    for call, (kind, rows) in enumerate(CALLS):
        total = sum(part(dtype, call, rank, rows).float() for rank in range(size))
        if kind == "gather":
            expected = torch.stack([torch.arange(rows * 2).view(rows, 2) * (rank - 1) for rank in range(size)])
            assert torch.equal(next(left), expected)
        elif kind.startswith("plain"):
            check_close(next(left), total.to(dtype))
        else:
            y, actual_total = next(left), next(left)
            check_close(actual_total, (total + normal(dtype, 7000 + call, rows, HIDDEN).float()).to(dtype))
            check_close(y, ops.rms_norm(actual_total, norm_weight(dtype, call), EPS))


def nan_and_strided(rank: int, buffers) -> list[Tensor]:
    nan = torch.full((2, HIDDEN), -1, dtype=torch.int16).view(buffers.dtype)
    wide, common = (part(buffers.dtype, call, rank * (1 - call), 9).view(3, 3 * HIDDEN) for call in (0, 1))
    results = []
    for two_shot in (False, True):
        results += [ops.all_reduce(nan.clone(), buffers, two_shot=two_shot)]
        results += ops.all_reduce_add_rms_norm(
            wide[:, HIDDEN : 2 * HIDDEN],
            common[:, :HIDDEN],
            torch.ones(HIDDEN, dtype=buffers.dtype),
            EPS,
            buffers,
            two_shot=two_shot,
        )
    return results


def test_nan_passes_and_rows_may_be_strided():
    """Data that looks like an empty slot does not stop anyone; one and two shots give the same bits."""
    dtype = torch.bfloat16
    wide = sum(part(dtype, 0, rank, 9).view(3, 3, HIDDEN)[:, 1].float() for rank in range(2))
    expected = (wide + part(dtype, 1, 0, 9).view(3, 3, HIDDEN)[:, 0].float()).to(dtype)
    for nan, y, total, nan_again, y_again, total_again in Ranks(2, dtype).run(nan_and_strided):
        assert bool(nan.isnan().all())
        assert bool(nan_again.isnan().all())
        check_close(total, expected)
        assert torch.equal(total, total_again)
        assert torch.equal(y, y_again)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": (25, HIDDEN)}, "^x must have 1 to 24 rows"),
        ({"x": (0, HIDDEN)}, "^x must have 1 to"),
        ({"x": (4, HIDDEN - 2)}, "^x must be"),
        ({"residual": (3, HIDDEN)}, "^residual must have the shape of x"),
        ({"weight": (HIDDEN - 1,)}, "^weight must have shape"),
    ],
)
def test_bad_arguments(change, message):
    shapes = {"x": (4, HIDDEN), "residual": (4, HIDDEN), "weight": (HIDDEN,)} | change
    tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    buffers = Ranks(2, torch.bfloat16).buffers(0)
    with pytest.raises(ValueError, match=message):
        ops.all_reduce_add_rms_norm(**tensors, eps=EPS, buffers=buffers, two_shot=True)
