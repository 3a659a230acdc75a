"""`TPGroup` where there is no symmetric memory: one rank, and two that talk over gloo."""

from __future__ import annotations

import logging
import multiprocessing
from pathlib import Path

import torch
import torch.distributed as dist

from rayllm.parallel.tp_group import TPGroup
from rayllm_kernels import ops

EPS = 1e-6


def rows(seed: int) -> torch.Tensor:
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(seed))


def test_one_rank():
    tp = TPGroup.single()
    assert tp.with_symmetric_memory(8, torch.bfloat16) is tp
    x, residual, weight = rows(0), rows(1), rows(2)[0]
    y, total = tp.all_reduce_add_rms_norm(x.clone(), residual, weight, EPS)
    expected_y, expected_total = ops.fused_add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(y, expected_y)
    assert torch.equal(total, expected_total)
    assert torch.equal(tp.gather_small(x), x[None])


def run_rank(rank: int, store: str, results) -> None:
    torch.set_num_threads(1)
    records: list[str] = []
    logger = logging.getLogger("rayllm.parallel.symmetric")
    logger.setLevel(logging.INFO)
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logger.addHandler(handler)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    tp = TPGroup(rank, 2, dist.group.WORLD).with_symmetric_memory(8, torch.bfloat16)
    y, total = tp.all_reduce_add_rms_norm(rows(rank), rows(5), rows(6)[0], EPS)
    results.put((rank, [t.tolist() for t in (y, total, tp.gather_small(rows(rank)))], records))
    dist.destroy_process_group()


def test_two_ranks_over_gloo(tmp_path: Path):
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    ranks = [context.Process(target=run_rank, args=(rank, str(tmp_path / "store"), results)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
        process.kill()
    assert [process.exitcode for process in ranks] == [0, 0]
    expected_y, expected_total = ops.fused_add_rms_norm(rows(0) + rows(1), rows(5), rows(6)[0], EPS)
    for rank, tensors, records in sorted(results.get() for _ in ranks):
        y, total, gathered = map(torch.tensor, tensors)
        assert torch.allclose(y, expected_y)
        assert torch.allclose(total, expected_total)
        assert torch.equal(gathered, torch.stack([rows(0), rows(1)]))
        assert records == ["all-reduces use gloo: symmetric memory is for CUDA devices"][rank:], "rank 0 says it, once"
