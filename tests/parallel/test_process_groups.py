"""What travels between the driver and a rank: plans, results of every length, and the end of both streams."""

from __future__ import annotations

import multiprocessing
from datetime import timedelta

import torch
import torch.distributed as dist

from rayllm.api.types import StepPlan, StepResult
from rayllm.parallel.process_groups import (
    Rendezvous,
    join_groups,
    pack,
    receive_plan,
    receive_result,
    send_plan,
    send_result,
)

# A result up to 8 KiB is one message, a longer one two: token ids of 5 bytes, around the border and far from it.
LENGTHS = [0, 1, *range(1620, 1645), 10_000]


def rank_process(port: int) -> None:
    torch.set_num_threads(1)
    groups = join_groups(Rendezvous("127.0.0.1", port, 1, "gloo"), 1, None, timedelta(seconds=60))
    while (plan := receive_plan(groups)) is not None:
        send_result(groups, pack(StepResult(plan.step_id, [2**31] * plan.step_id)))
    send_result(groups, pack(None))
    dist.destroy_process_group()


def test_plans_and_results_of_every_length():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rank = multiprocessing.get_context("spawn").Process(target=rank_process, args=(store.port,))
    rank.start()
    groups = join_groups(Rendezvous("127.0.0.1", store.port, 1, "gloo"), 0, store, timedelta(seconds=60))
    try:
        for length in LENGTHS:
            send_plan(groups, pack(StepPlan(length, [], [], [], [], [], [], 0, 0)))
            assert receive_result(groups) == StepResult(length, [2**31] * length)
        send_plan(groups, pack(None))
        assert receive_result(groups) is None
    finally:
        dist.destroy_process_group()
        rank.join(30)
        rank.kill()
    assert rank.exitcode == 0
