"""All-reduce over symmetric memory, on two and on four GPUs: right, equal on all ranks, and equal every time."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.closeness import check_close
from torch import Tensor

from rayllm.parallel.symmetric import SymmetricReducer
from rayllm_kernels import ops

EPS = 1e-5
HIDDEN_SIZES = (4096, 5120)
ROWS = (1, 3, 8, 17, 64, 100, 129, 257, 513, 1000, 2048)
DTYPE = torch.bfloat16
DEADLINE_SECONDS = 120


def normal(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.float32).to(DTYPE)


class Rank:
    """What one process checks. All ranks run the same methods in the same order."""

    def __init__(self, rank: int, size: int, store: str):
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=size)
        self.rank, self.size = rank, size
        # In SymmetricReducer's constructor a failure is an error, unlike in `connect`.
        self.reducers = {hidden: SymmetricReducer(dist.group.WORLD, hidden, DTYPE) for hidden in HIDDEN_SIZES}
        self.rng = random.Random(rank)

    def dawdle(self) -> None:
        """Be late by up to about 100 us, now and then."""
        if self.rng.random() < 0.3:
            torch.cuda._sleep(self.rng.randrange(200_000))

    def assert_same_on_all_ranks(self, tensor: Tensor) -> None:
        words = tensor.contiguous().view(torch.int32)
        gathered = words.new_empty(self.size, *words.shape)
        dist.all_gather_into_tensor(gathered.view(-1), words.view(-1))
        assert bool((gathered == words).all()), f"ranks differ at {tuple(tensor.shape)}"

    def check_values(self) -> None:
        """Every size, in one and in two shots, against the sum in fp32."""
        for call, rows in enumerate(ROWS):
            for hidden, reducer in self.reducers.items():
                buffers = reducer.buffers
                parts = [normal(100 * call + rank, rows, hidden) for rank in range(self.size)]
                residual, weight = normal(100 * call + 50, rows, hidden), normal(100 * call + 51, hidden)
                exact = sum(part.double() for part in parts)
                results = []
                for two_shot in (False, True):
                    if not two_shot and rows > buffers.max_one_shot_rows:
                        continue
                    self.dawdle()
                    y, total = ops.all_reduce_add_rms_norm(
                        parts[self.rank], residual, weight, EPS, buffers, two_shot=two_shot
                    )
                    plain = ops.all_reduce(parts[self.rank].clone(), buffers, two_shot=two_shot)
                    results.append((y, total, plain))
                    # One rounding to bf16: half of 2^-7 of the value at most, and what fp32 adds.
                    assert bool(((total - (exact + residual)).abs() <= (exact + residual).abs() / 255 + 1e-5).all())
                    assert bool(((plain - exact).abs() <= exact.abs() / 255 + 1e-5).all())
                    check_close(y, ops.rms_norm(total, weight, EPS))
                    for tensor in (y, total, plain):
                        self.assert_same_on_all_ranks(tensor)
                for other in results[1:]:
                    assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True)), "one and two shots"

    def check_gather(self) -> None:
        reducer = self.reducers[4096]
        for rows in (1, 7, 64, 300):
            for dtype in (torch.float32, torch.int64):
                x = [(torch.arange(2 * rows, device="cuda").view(rows, 2) * r - 1).to(dtype) for r in range(self.size)]
                assert reducer.takes_gather(x[0])
                self.dawdle()
                assert torch.equal(reducer.gather_small(x[self.rank]), torch.stack(x))

    def check_graphs_and_eager(self) -> None:
        """2,000 calls of mixed sizes, most of them replayed, with ranks late at random; all like the first time."""
        rows = [self_rows for _ in range(5) for self_rows in (1, 64, 7, 333, 32)]  # an odd number of calls
        calls = []
        for call, count in enumerate(rows):
            hidden = HIDDEN_SIZES[call // 2 % 2]
            inputs = normal(9000 + 10 * call + self.rank, count, hidden), normal(9009 + 10 * call, count, hidden)
            calls.append((self.reducers[hidden], *inputs, torch.ones(hidden, device="cuda", dtype=DTYPE)))

        def run(call: int) -> tuple[Tensor, ...]:
            reducer, x, residual, weight = calls[call]
            y, total = reducer.all_reduce_add_rms_norm(x, residual, weight, EPS)
            return y, total, reducer.all_reduce(x.clone()), reducer.gather_small(y[:, :2].contiguous())

        expected = [run(call) for call in range(len(calls))]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = [run(call) for call in range(len(calls))]
        for replay in range(24):
            self.dawdle()
            graph.replay()
            checked = self.rng.randrange(len(calls))
            assert all(torch.equal(a, b) for a, b in zip(captured[checked], expected[checked], strict=True))
            for tensor in captured[checked]:
                tensor.fill_(float("nan"))
            call = replay % len(calls)
            self.dawdle()
            assert all(torch.equal(a, b) for a, b in zip(run(call), expected[call], strict=True))

    def check_all_slots_are_empty(self) -> None:
        torch.cuda.synchronize()
        dist.barrier()
        for reducer in self.reducers.values():
            words, _ = reducer._memory
            assert bool((words == -1).all())


def run_rank(rank: int, size: int, store: str) -> None:
    here = Rank(rank, size, store)
    here.check_values()
    here.check_gather()
    here.check_graphs_and_eager()
    here.check_all_slots_are_empty()
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [2, 4])
def test_all_reduce(size: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} CUDA devices")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(size)))).split(",")
    logs = [tmp_path / f"rank{rank}" for rank in range(size)]
    ranks = []
    try:
        for rank, log in enumerate(logs):
            command = [sys.executable, __file__, str(rank), str(size), str(tmp_path / "store")]
            # Each sees its own GPU only, as an engine's ranks do.
            own = environment | {"CUDA_VISIBLE_DEVICES": devices[rank]}
            with log.open("w") as output:
                ranks.append(subprocess.Popen(command, env=own, stdout=output, stderr=output))
        deadline = time.monotonic() + DEADLINE_SECONDS
        # One that failed leaves the others waiting, so there is no point in waiting for them.
        while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
            assert time.monotonic() < deadline, "a rank waits for ever"
            time.sleep(0.2)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    failed = [log.read_text()[-3000:] for rank, log in zip(ranks, logs, strict=True) if rank.returncode > 0]
    assert not failed, failed[0]
    assert all(rank.returncode == 0 for rank in ranks)


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
