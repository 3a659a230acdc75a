"""Steps share one pool of memory with captured graphs: what kernels keep between calls must lie outside of it."""

from __future__ import annotations

import random

import pytest
import torch
from support.model_factory import make_model

from rayllm import LLM, SamplingParams

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")


def test_replays_of_all_sizes_leave_the_counters_of_projections_alone(tmp_path):
    """Large mixed steps, then decodes of every size: with a counter that is not zero, a projection waits for ever."""
    from rayllm_kernels.linear import hopper_kernel

    hopper_kernel.flags.cache_clear()  # as in a new process
    shape = {"hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128}
    folder = make_model(tmp_path, "qwen3", dtype="bfloat16", max_position_embeddings=2048, **shape)
    rng = random.Random(0)
    prompts = [[rng.randrange(4, 250) for _ in range(rng.randint(20, 400))] for _ in range(128)]
    params = [SamplingParams(max_tokens=16 + i, temperature=0.6, ignore_eos=True) for i in range(128)]
    with LLM(
        folder,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_num_seqs=128,
        max_num_batched_tokens=2048,
        num_gpu_blocks_override=6000,
    ) as llm:
        flags = hopper_kernel.flags(torch.device("cuda", torch.cuda.current_device()))
        worker = llm.engine._executor._worker  # type: ignore[attr-defined]
        for segment in worker._memory._pool.snapshot():
            assert not segment["address"] <= flags.data_ptr() < segment["address"] + segment["total_size"]
        for _ in range(2):
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert [len(output.outputs[0].token_ids) for output in outputs] == [16 + i for i in range(128)]
            torch.cuda.synchronize()
            assert not flags.any()
