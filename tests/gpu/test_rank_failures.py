"""Ranks on GPUs that are killed or stopped: errors in seconds, nothing left on the GPUs, and a new engine starts."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from support.model_factory import make_model

from rayllm import LLM, SamplingParams
from rayllm.config.model_spec import load_model_spec
from rayllm.config.options import EngineConfig
from rayllm.errors import EngineDeadError, StartupError
from rayllm.executor.ray import RayExecutor
from rayllm.worker.worker import Worker

RANKS = 4 if torch.cuda.device_count() >= 4 else 2
pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

DEADLINE_SECONDS = 10.0
LEFT_MIB = 64  # what a device's figure may differ by without a process on it
OPTIONS = {"tensor_parallel_size": RANKS, "max_num_seqs": 8, "max_num_batched_tokens": 512, "executor": "ray"}
PARAMS = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)


class DyingWorker(Worker):
    """Its rank 1 gets a signal while weights load."""

    def __init__(self, config, spec, tp, device, *, number):
        super().__init__(config, spec, tp, device)
        self.number = number

    def load_model(self):
        super().load_model()
        if self._tp.rank == 1:
            os.kill(os.getpid(), self.number)


def memory_in_use() -> list[int]:
    """MiB of each device, whoever holds them."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [int(line) for line in subprocess.check_output(query, text=True).split()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def assert_nothing_is_left(pids: list[int], before: list[int]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        more = [now - then for now, then in zip(memory_in_use(), before, strict=True)]
        if not any(map(is_running, pids)) and max(more) <= LEFT_MIB:
            return
        time.sleep(0.2)
    pytest.fail(f"processes {[pid for pid in pids if is_running(pid)]}, MiB more than before on each device: {more}")


def signal_at(llm: LLM, step: int, rank: int, number: signal.Signals) -> list[float]:
    """Send a signal to a rank after so many plans were submitted; the list gets the time of it."""
    executor = llm.engine._executor
    submit, count, sent = executor.submit, [0], []

    def submit_and_signal(plan):
        submit(plan)
        count[0] += 1
        if count[0] == step:
            os.kill(executor._ranks._pids[rank], number)
            sent.append(time.monotonic())

    executor.submit = submit_and_signal
    return sent


def test_every_request_ends_and_the_gpus_are_free_again(tmp_path, ray_cluster):
    shape = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 64, "num_key_value_heads": 4}
    folder = make_model(tmp_path, "qwen3", dtype="bfloat16", **shape)
    rng = random.Random(0)
    prompts = [[rng.randrange(4, 250) for _ in range(rng.randint(100, 300))] for _ in range(12)]
    before = memory_in_use()
    expected = None
    # In a prompt's step and in a decode; the rank that the driver hears first, and the last one.
    for step, rank, number in ((2, 0, signal.SIGKILL), (60, RANKS - 1, signal.SIGSTOP)):
        llm = LLM(folder, skip_tokenizer_init=True, gpu_memory_utilization=0.3, **OPTIONS)
        pids = list(llm.engine._executor._ranks._pids)
        tokens = [out.outputs[0].token_ids for out in llm.generate(prompts, PARAMS, use_tqdm=False)]
        assert tokens == (expected or tokens)
        expected = tokens
        sent = signal_at(llm, step, rank, number)
        other = [[token + 1 for token in prompt] for prompt in prompts]
        with pytest.raises(EngineDeadError, match=f"rank {rank} on node"):
            llm.generate(other, PARAMS, use_tqdm=False)
        assert time.monotonic() - sent[0] < DEADLINE_SECONDS
        llm.shutdown()
        assert_nothing_is_left(pids, before)
    config = EngineConfig(model=folder, gpu_memory_utilization=0.3, skip_tokenizer_init=True, **OPTIONS)
    for number in (signal.SIGKILL, signal.SIGSTOP):
        executor = RayExecutor(config, load_model_spec(folder), partial(DyingWorker, number=number))
        with pytest.raises(StartupError, match="rank 1 on node"):
            executor.start()
        executor.shutdown()
        assert_nothing_is_left(executor._ranks._pids, before)
    with LLM(folder, skip_tokenizer_init=True, gpu_memory_utilization=0.3, **OPTIONS) as llm:
        assert [out.outputs[0].token_ids for out in llm.generate(prompts, PARAMS, use_tqdm=False)] == expected
