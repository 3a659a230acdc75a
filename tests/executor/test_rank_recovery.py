"""A real engine whose ranks are killed again and again: every request goes on, to the bit as without that."""

from __future__ import annotations

import os
import re
import shutil
import signal

import pytest
from support.engine import outputs_of
from support.launched import BUNDLED
from support.request_kinds import requests_of_every_kind

from rayllm.config.options import EngineConfig
from rayllm.engine.build import start_engine
from rayllm.serve.cluster.launch import describe_start
from rayllm.text.tokenizer import load_tokenizer

pytestmark = pytest.mark.usefixtures("ray_cluster")


def test_requests_of_every_kind_go_on(tmp_path, monkeypatch):
    """First with standbys, which need no checkpoint, and again before their successors have mapped any weights."""
    tokenizer = load_tokenizer(BUNDLED)
    folder = shutil.copytree(BUNDLED, tmp_path / "model")
    (checkpoint,) = folder.glob("*.safetensors")
    common = {"model": str(folder), "device": "cpu", "max_num_batched_tokens": 64, "num_gpu_blocks_override": 200}
    core = start_engine(EngineConfig(**common, tensor_parallel_size=2, deterministic=True))
    try:
        assert re.search(r"standbys 0\.\d\d, 0\.\d\d GiB", " ".join(describe_start(core.info)))
        undisturbed = outputs_of(core, requests_of_every_kind(tokenizer), tokenizer)
        step, num_steps = core.step, 0

        def step_and_kill():
            nonlocal num_steps
            num_steps += 1
            if num_steps == 3:
                checkpoint.rename(tmp_path / "elsewhere")
            if num_steps == 30:
                (tmp_path / "elsewhere").rename(checkpoint)
            if num_steps in (3, 30):  # in the prompts; among decodes
                pid = re.search(r"process (\d+)", core.info.start.placement[-1])[1]
                os.kill(int(pid), signal.SIGKILL)
            return step()

        monkeypatch.setattr(core, "step", step_and_kill)
        disturbed = outputs_of(core, requests_of_every_kind(tokenizer), tokenizer)
        core.check_integrity()
        assert core.stats().num_recoveries == 2
        for before, after in zip(undisturbed, disturbed, strict=True):
            assert after.num_recoveries > 0
            assert after.outputs == before.outputs, before.request_id
            assert after.prompt_logprobs == before.prompt_logprobs
            assert after.embedding == before.embedding
    finally:
        core.shutdown()
