"""`TPGroup` where there is no symmetric memory: one rank, and two that talk over gloo."""

from __future__ import annotations

import hashlib
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


def run_all(run, num_ranks: int, store: Path) -> list:
    """What processes of so many ranks put into their queue, sorted."""
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    ranks = [context.Process(target=run, args=(rank, str(store), results)) for rank in range(num_ranks)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
        process.kill()
    assert [process.exitcode for process in ranks] == [0] * num_ranks
    return sorted(results.get() for _ in ranks)


def test_two_ranks_over_gloo(tmp_path: Path):
    expected_y, expected_total = ops.fused_add_rms_norm(rows(0) + rows(1), rows(5), rows(6)[0], EPS)
    for rank, tensors, records in run_all(run_rank, 2, tmp_path / "store"):
        y, total, gathered = map(torch.tensor, tensors)
        assert torch.allclose(y, expected_y)
        assert torch.allclose(total, expected_total)
        assert torch.equal(gathered, torch.stack([rows(0), rows(1)]))
        assert records == ["all-reduces use gloo: symmetric memory is for CUDA devices"][rank:], "rank 0 says it, once"


NUM_RANKS = 4


def part(rank: int) -> torch.Tensor:
    """What a rank adds: sums of four such numbers depend on the order of the additions."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(700, 64, generator=generator) * 10.0 ** torch.randint(-3, 4, (700, 64), generator=generator)


def digest(x: torch.Tensor) -> str:
    """Of its bits."""
    return hashlib.sha256(x.float().numpy().tobytes()).hexdigest()


def run_sums(rank: int, store: str, results) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_RANKS)
    tp = TPGroup(rank, NUM_RANKS, dist.group.WORLD, fixed_order=True)
    totals = []
    for dtype in (torch.float32, torch.bfloat16):
        x = part(rank).to(dtype)
        whole = tp.all_reduce(x.clone())
        pieces = torch.cat([tp.all_reduce(piece.clone()) for piece in x.split([1, 2, 5, 192, 500])])
        assert torch.equal(whole, pieces)
        totals.append(digest(whole))
    results.put((rank, totals))
    dist.destroy_process_group()


def test_sums_in_the_order_of_the_ranks_do_not_depend_on_their_size(tmp_path: Path):
    answers = run_all(run_sums, NUM_RANKS, tmp_path / "store")
    for dtype, totals in zip(
        (torch.float32, torch.bfloat16), zip(*(each for _, each in answers), strict=True), strict=True
    ):
        expected = torch.zeros(700, 64)
        for rank in range(NUM_RANKS):
            expected += part(rank).to(dtype)
        assert set(totals) == {digest(expected.to(dtype))}
