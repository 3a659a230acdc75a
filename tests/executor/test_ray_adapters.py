"""Adapters of an engine whose two ranks are actors: read by both or by none, and again by their successors."""

from __future__ import annotations

import os
import re
import signal

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.adapters import greedy, make_adapter, merged
from support.model_factory import make_model

from rayllm import LLM, SamplingParams
from rayllm.errors import ModelError

pytestmark = pytest.mark.usefixtures("ray_cluster")
PROMPT, COUNT = list(range(3, 150, 7)), 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)


def test_two_ranks(tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    folder = make_model(tmp_path / "model", "llama")
    paths = {name: make_adapter(tmp_path / name, folder, seed=n, size=0.6) for n, name in enumerate(("a", "b"))}
    bad = make_adapter(tmp_path / "bad", folder)
    tensors = load_file(f"{bad}/adapter_model.safetensors")
    name = next(name for name in tensors if "o_proj.lora_A" in name)
    save_file(tensors | {name: tensors[name][:, 1:].contiguous()}, f"{bad}/adapter_model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = []
    for path in (None, *paths.values()):
        with merged(model, path):
            expected += greedy(model, [PROMPT], COUNT)
    options = {"device": "cpu", "skip_tokenizer_init": True, "tensor_parallel_size": 2, "num_gpu_blocks_override": 64}
    with LLM(folder, **options, enable_lora=True, max_loras=2, lora_modules={"a": paths["a"]}) as llm:

        def tokens() -> list[list[int]]:
            outputs = llm.generate([PROMPT] * 3, GREEDY, use_tqdm=False, adapter=[None, "a", "b"])
            return [output.outputs[0].token_ids for output in outputs]

        llm.load_lora_adapter("b", paths["b"])
        assert tokens() == expected
        with pytest.raises(ModelError, match=r"o_proj.lora_A.weight is .* but must be"):
            llm.load_lora_adapter("bad", bad)
        core, step, num_steps = llm.engine, llm.engine.step, 0

        def step_and_kill():
            nonlocal num_steps
            num_steps += 1
            if num_steps == 5:
                os.kill(int(re.search(r"process (\d+)", core.info.start.placement[-1])[1]), signal.SIGKILL)
            return step()

        monkeypatch.setattr(core, "step", step_and_kill)
        assert tokens() == expected
        assert llm.stats().num_recoveries == 1
        core.check_integrity()
