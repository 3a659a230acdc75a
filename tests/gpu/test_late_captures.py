"""Steps of more sequences than most servers see are captured when they come, and compute the same before and after."""

from __future__ import annotations

import random

import pytest
import torch
from support.model_factory import make_model

from rayllm import LLM, SamplingParams
from rayllm.worker.memory import StepMemory

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_steps_of_many_sequences_are_captured_when_they_come_again(tmp_path, monkeypatch):
    captured: list[str] = []
    capture = StepMemory.capture

    def note(self, step, mode="global"):
        captured.append(mode)
        return capture(self, step, mode)

    monkeypatch.setattr(StepMemory, "capture", note)
    folder = make_model(tmp_path, "qwen3", dtype="bfloat16", max_position_embeddings=4096)
    rng = random.Random(0)
    prompts = [[rng.randrange(4, 250) for _ in range(rng.choice((1, 5, 60, 300)))] for _ in range(500)]
    params = [
        SamplingParams(temperature=rng.choice((0.0, 1.0)), seed=7, max_tokens=rng.randint(30, 60), ignore_eos=True)
        for _ in prompts
    ]
    options = {"max_num_seqs": 500, "max_num_batched_tokens": 2048, "num_gpu_blocks_override": 20_000}
    with LLM(folder, skip_tokenizer_init=True, enable_prefix_caching=False, **options) as llm:
        at_start = len(captured)
        results = []
        for _ in range(3):
            results.append([each.outputs[0].token_ids for each in llm.generate(prompts, params, use_tqdm=False)])
            llm.engine.check_integrity()
    assert at_start == captured.count("global")
    assert captured.count("thread_local") >= 4, "decode steps of 320, 384, 448 and 500 sequences"
    assert results[0] == results[1] == results[2]
