"""Times an all-reduce with the residual add and RMSNorm after it on the GPUs of one host.

    PYTHONPATH=.:kernels python benchmarks/all_reduce.py [number of GPUs]

Microseconds a call of [M, hidden] bf16, in a CUDA graph of 64 calls on different data: the median of replays, each as
long as its slowest rank. NVLink multicast is off.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
import torch.multiprocessing as mp
from torch import Tensor

from rayllm.parallel.symmetric import SymmetricReducer
from rayllm_kernels import ops

ROWS = (1, 8, 32, 64, 128, 256, 512, 1024, 2048)
HIDDEN_SIZES = (4096, 5120)
CALLS, REPLAYS = 64, 9
ROTATED_BYTES = 256 << 20  # several times the L2 cache
EPS = 1e-5

Call = Callable[[Tensor, Tensor], object]


def normal(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16, device="cuda").normal_()


def measure_us(call: Call, inputs: list[tuple[Tensor, Tensor]]) -> float:
    """Median microseconds of one call of `call(x, residual)`, in a graph."""
    call(*inputs[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(CALLS):
            call(*inputs[i % len(inputs)])
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(REPLAYS + 1):
        dist.barrier()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        slowest = torch.tensor(begin.elapsed_time(end), device="cuda")
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        times.append(slowest.item() * 1e3 / CALLS)
    return statistics.median(times[1:])


def ways(hidden: int, max_rows: int, weight: Tensor) -> dict[str, tuple[int, Call]]:
    """name -> (most rows, the call), for every way to sum and normalise."""
    reducer = SymmetricReducer(dist.group.WORLD, hidden, torch.bfloat16, max_rows)
    staged = symmetric_memory.empty(max_rows, hidden, dtype=torch.bfloat16, device=weight.device)
    symmetric_memory.rendezvous(staged, dist.group.WORLD)
    group_name = dist.group.WORLD.group_name

    def nccl(x: Tensor, residual: Tensor) -> object:
        dist.all_reduce(x)
        return ops.fused_add_rms_norm(x, residual, weight, EPS)

    def torch_two_shot(x: Tensor, residual: Tensor) -> object:
        # In place in symmetric memory: as if the product before had written there.
        y = staged[: x.shape[0]]
        torch.ops.symm_mem.two_shot_all_reduce_(y, "sum", group_name)
        return ops.fused_add_rms_norm(y, residual, weight, EPS)

    def ours(two_shot: bool) -> Call:
        return lambda x, residual: ops.all_reduce_add_rms_norm(
            x, residual, weight, EPS, reducer.buffers, two_shot=two_shot
        )

    return {
        "NCCL + norm": (max_rows, nccl),
        "torch two-shot + norm": (max_rows, torch_two_shot),
        "ours, one shot": (reducer.buffers.max_one_shot_rows, ours(False)),
        "ours, two shots": (reducer.buffers.max_rows, ours(True)),
    }


def run_rank(rank: int, size: int, store: str) -> None:
    os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{store}", rank=rank, world_size=size, device_id=torch.device("cuda", rank)
    )
    for hidden in HIDDEN_SIZES:
        weight = normal(hidden)
        calls = ways(hidden, max(ROWS), weight)
        if rank == 0:
            print(f"\n{size} GPUs, hidden {hidden}, us" + "".join(f"{rows:>8}" for rows in ROWS), flush=True)
        for name, (most, call) in calls.items():
            figures = []
            for rows in ROWS:
                copies = max(2, min(CALLS, ROTATED_BYTES // (4 * rows * hidden)))
                inputs = [(normal(rows, hidden), normal(rows, hidden)) for _ in range(copies)]
                figures.append(f"{measure_us(call, inputs):8.1f}" if rows <= most else " " * 8)
            if rank == 0:
                print(f"{name:24}" + "".join(figures), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    gpus = int(sys.argv[1]) if len(sys.argv) > 1 else min(4, torch.cuda.device_count())
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, (gpus, f"{folder}/store"), nprocs=gpus)
