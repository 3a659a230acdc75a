"""Ranks on GPUs that are killed or stopped: errors in seconds, nothing left on the GPUs, and a new engine starts."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from functools import partial

import pytest
import torch
from support.engine import outputs_of
from support.model_factory import make_model
from support.processes import is_running
from support.stand_ins import pids_of

from rayllm import LLM, SamplingParams, timeouts
from rayllm.api.types import GenerationRequest
from rayllm.config.options import EngineConfig
from rayllm.config.resolved import resolve
from rayllm.engine.build import start_resolved_engine
from rayllm.errors import EngineDeadError, StartupError
from rayllm.executor.ray import RayExecutor
from rayllm.worker.worker import RankModel

RANKS = 4 if torch.cuda.device_count() >= 4 else 2
pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

DEADLINE_SECONDS = 10.0
LEFT_MIB = 64  # what a device's figure may differ by without a process on it
OPTIONS = {"tensor_parallel_size": RANKS, "max_num_seqs": 8, "max_num_batched_tokens": 512, "executor": "ray"}
PARAMS = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)


class DyingRank(RankModel):
    """Its rank 1 gets a signal while weights load."""

    def __init__(self, config, tp, device, weights=None, *, number):
        super().__init__(config, tp, device, weights)
        if tp.rank == 1:
            os.kill(os.getpid(), number)


class SignallingExecutor(RayExecutor):
    """Sends a signal to a rank after so many plans from `arm` on."""

    plans_left = 0

    def arm(self, step: int, rank: int, number: signal.Signals) -> None:
        self.plans_left, self.rank, self.number = step, rank, number

    def submit(self, plan):
        super().submit(plan)
        self.plans_left -= 1
        if self.plans_left == 0:
            os.kill(pids_of(self)[self.rank], self.number)
            self.sent = time.monotonic()


def memory_in_use() -> list[int]:
    """MiB of each device, whoever holds them."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [int(line) for line in subprocess.check_output(query, text=True).split()]


def assert_nothing_is_left(pids: list[int], before: list[int]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        more = [now - then for now, then in zip(memory_in_use(), before, strict=True)]
        if not any(map(is_running, pids)) and max(more) <= LEFT_MIB:
            return
        time.sleep(0.2)
    pytest.fail(f"processes {[pid for pid in pids if is_running(pid)]}, MiB more than before on each device: {more}")


def test_every_request_ends_and_the_gpus_are_free_again(tmp_path, ray_cluster, monkeypatch):
    shape = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 64, "num_key_value_heads": 4}
    folder = make_model(tmp_path, "qwen3", dtype="bfloat16", **shape)
    rng = random.Random(0)
    prompts = [[rng.randrange(4, 250) for _ in range(rng.randint(100, 300))] for _ in range(12)]
    requests = [
        [GenerationRequest(request_id=f"{name}{i}", prompt_token_ids=prompt, params=PARAMS) for i, prompt in batch]
        for name, batch in (
            ("a", enumerate(prompts)),
            ("b", enumerate([token + 1 for token in prompt] for prompt in prompts)),
        )
    ]
    options = EngineConfig(model=folder, gpu_memory_utilization=0.3, skip_tokenizer_init=True, **OPTIONS)
    config = resolve(options, torch.cuda.device_count())
    before = memory_in_use()
    expected = None
    # In a prompt's step and in a decode; the rank that the driver hears first, and the last one.
    for step, rank, number in ((2, 0, signal.SIGKILL), (60, RANKS - 1, signal.SIGSTOP)):
        executor = SignallingExecutor(config)
        core = start_resolved_engine(config, executor)
        tokens = [output.outputs[0].token_ids for output in outputs_of(core, requests[0])]
        assert tokens == (expected or tokens)
        expected = tokens
        executor.arm(step, rank, number)
        with pytest.raises(EngineDeadError, match=f"rank {rank} on node"):
            outputs_of(core, requests[1])
        assert time.monotonic() - executor.sent < DEADLINE_SECONDS
        core.shutdown()
        assert_nothing_is_left(pids_of(executor), before)
    monkeypatch.setattr(timeouts, "RANK_START_SILENCE_S", 6.0)
    for number in (signal.SIGKILL, signal.SIGSTOP):
        executor = RayExecutor(config, partial(DyingRank, number=number))
        with pytest.raises(StartupError, match="rank 1 on node"):
            executor.start()
        assert_nothing_is_left(pids_of(executor), before)
    with LLM(folder, skip_tokenizer_init=True, gpu_memory_utilization=0.3, **OPTIONS) as llm:
        assert [out.outputs[0].token_ids for out in llm.generate(prompts, PARAMS, use_tqdm=False)] == expected
