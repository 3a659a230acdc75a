"""What computing and moving KV takes: measured at the start, handed to the scheduler, and the options around it."""

from __future__ import annotations

import pytest
import torch

from rayllm import LLM, SamplingParams
from rayllm.api.types import KVCosts, RankReady, StartReport
from rayllm.config.options import EngineConfig, make_config
from rayllm.errors import ConfigError


def make_llm(**options: object) -> LLM:
    torch.set_num_threads(1)
    options = {"num_gpu_blocks_override": 16, **options}
    return LLM(device="cpu", skip_tokenizer_init=True, max_model_len=128, **options)


def test_nothing_to_move_costs_nothing():
    costs = KVCosts(recompute_token=2.0, swap_out_block=3.0, swap_in_block=5.0, transfer=7.0)
    assert [costs.recompute(n) for n in (0, 4)] == [0.0, 8.0]
    assert [costs.swap_out(n) for n in (0, 1, 2)] == [0.0, 10.0, 13.0]
    assert [costs.swap_in(n) for n in (0, 1, 2)] == [0.0, 12.0, 17.0]


def test_ranks_wait_for_the_slowest():
    assert StartReport().kv_costs() is None
    assert StartReport(ready=[RankReady(), RankReady()]).kv_costs() is None
    ranks = [RankReady(kv_costs=KVCosts(1.0, 5.0, 1.0, 1.0)), RankReady(kv_costs=KVCosts(2.0, 1.0, 1.0, 3.0))]
    assert StartReport(ready=ranks).kv_costs() == KVCosts(2.0, 5.0, 1.0, 3.0)


def test_costs_are_measured_where_there_is_something_to_decide():
    with make_llm(swap_space=0.05) as llm:
        costs = llm.engine.info.start.kv_costs()
        assert min(costs.recompute_token, costs.swap_out_block, costs.swap_in_block) > 0
        assert costs.transfer >= 0
        assert llm.stats().num_total_cpu_blocks > 16
    for options in ({}, {"swap_space": 0.05, "preemption_mode": "recompute", "enable_prefix_caching": False}):
        with make_llm(**options) as llm:
            assert llm.engine.info.start.kv_costs() is None
            assert llm.stats().num_total_cpu_blocks == 0
            output = llm.generate([[1, 2]], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)[0]
            assert output.num_preemptions == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preemption_mode": "swop"}, "preemption_mode: input should be 'cost', 'recompute' or 'swap'"),
        ({"swap_space": -1}, "swap_space"),
        ({"swap_space": float("inf")}, "swap_space"),
    ],
)
def test_bad_options_name_themselves(options, message):
    with pytest.raises(ConfigError, match=message):
        make_config(EngineConfig, options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preemption_mode": "swap", "swap_space": 1e-9}, r"swap_space 1e-09 GiB is less than a block"),
        ({"swap_space": 1e6}, r"swap_space: 1000000.0 GiB of host memory cannot be had"),
        (
            {"num_gpu_blocks_override": 2**31 - 1, "block_size": 1024},
            r"2147483647 blocks \(num_gpu_blocks_override\) takes .* GiB, which cannot be had",
        ),
    ],
)
def test_room_that_cannot_be(options, message):
    with pytest.raises(ConfigError, match=message):
        make_llm(**options)
