"""Whatever requests ask for, their kernels are compiled when the engine starts: none stops a server for seconds."""

from __future__ import annotations

import random
import sys

import pytest
import torch
from support.model_factory import make_model

from rayllm import LLM, SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

WAYS = [
    {"temperature": 0.0},
    {"temperature": 0.6},
    {"temperature": 0.8, "top_p": 0.9, "logprobs": 5},
    {"temperature": 0.8, "top_k": 20, "min_p": 0.05, "seed": 1},
    {"temperature": 0.0, "presence_penalty": 0.5, "frequency_penalty": 0.1, "logprobs": 1},
    {"temperature": 1.0, "repetition_penalty": 1.1, "prompt_logprobs": 2, "logit_bias": {3: 1.0}},
    {"temperature": 1.0, "n": 3},
]


@pytest.mark.parametrize(
    ("enforce_eager", "deterministic"), [(False, False), (True, False), (False, True)], ids=["graphs", "eager", "exact"]
)
def test_all_kernels_are_compiled_at_the_start(tmp_path, monkeypatch, enforce_eager, deterministic):
    from triton import JITFunction, knobs

    for module in [module for name, module in sys.modules.items() if name.startswith("rayllm_kernels")]:
        for kernel in [value for value in vars(module).values() if isinstance(value, JITFunction)]:
            kernel.device_caches.clear()  # of kernels that another engine of this process has compiled
    shape = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 128}
    folder = make_model(tmp_path, "qwen3", dtype="bfloat16", max_position_embeddings=4096, **shape)
    rng = random.Random(0)
    with LLM(
        folder,
        skip_tokenizer_init=True,
        max_num_seqs=48,
        max_num_batched_tokens=4096,
        enforce_eager=enforce_eager,
        deterministic=deterministic,
        num_gpu_blocks_override=4000,
    ) as llm:
        compiled: list[str] = []

        def note(**compilation: object) -> bool:
            compiled.append(str(compilation["repr"])[:200])
            return False

        monkeypatch.setattr(knobs.runtime, "jit_cache_hook", note)
        for count in (1, 2, 3, 7, 20, 90):
            prompts = [[rng.randrange(4, 250) for _ in range(rng.choice((1, 5, 60, 300, 900)))] for _ in range(count)]
            params = [
                SamplingParams(max_tokens=rng.randint(1, 40), ignore_eos=True, **rng.choice(WAYS)) for _ in range(count)
            ]
            llm.generate(prompts, params, use_tqdm=False)
    assert not compiled
