"""Adapters of a model split over ranks, each a thread: logits of mixed batches are those of merged weights."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import support.model_factory as factory
import torch
from safetensors.torch import load_file, save_file
from support.adapters import (
    DELTA_LINEARS,
    GEMMA4_LINEARS,
    GROUPED_DELTA_LINEARS,
    LATENT_LINEARS,
    LLAMA_LINEARS,
    edit_config,
    make_adapter,
    merged,
)
from support.thread_group import ThreadGroup
from support.yardstick import Yardstick

from rayllm.api.types import Adapter
from rayllm.config.lora import adapter_digest
from rayllm.errors import ModelError
from rayllm.parallel.tp_group import TPGroup
from rayllm.worker.adapters import AdapterStore

PROMPTS = {"a": list(range(3, 90, 7)), "b": list(range(200, 100, -9)), "c": list(range(5, 60, 4)), "d": [7] * 5}
SLOTS = {"a": 0, "b": 1, "c": -1, "d": 0}


def load_adapters(model, paths):
    store = AdapterStore(model)
    for number, path in enumerate(paths):
        store.load(Adapter(10 + number, f"a{number}", path, adapter_digest(path)))
        store.put(number, 10 + number)
    return store


def drive(folder, tp, paths):
    """Logits of each sequence's tokens on one rank: prefill, then a mixed step. Slot 2 has had other weights before."""
    torch.set_num_threads(1)
    model = factory.load(folder, tp, enable_lora=True, max_loras=3, max_lora_rank=16)
    load_adapters(model, paths)
    runner, of_few = factory.PagedRunner(model), factory.PagedRunner(model)
    found = {name: [] for name in PROMPTS}
    first = [(name, tokens[:-1] if name != "d" else tokens[:2]) for name, tokens in PROMPTS.items()]
    then = [(name, tokens[-1:]) for name, tokens in PROMPTS.items() if name != "d"] + [("d", PROMPTS["d"][2:])]
    for work, num_decodes in ((first, 0), (then, 3)):
        batch = runner.batch(work, num_decodes, 0)
        slots = torch.tensor([SLOTS[name] for name, tokens in work for _ in tokens], dtype=torch.int32)
        batch = replace(batch, logit_rows=None, adapter_slots=slots)
        with torch.inference_mode():
            logits = model.compute_logits(model(batch, runner.caches))
            rows = torch.tensor([len(work[0][1]) - 1, len(slots) - 1])
            # A model may then go on with these tokens alone.
            few = replace(of_few.batch(work, num_decodes, 0), logit_rows=rows, adapter_slots=slots)
            torch.testing.assert_close(model.compute_logits(model(few, of_few.caches)), logits[rows], atol=1e-4, rtol=0)
        for (name, _), part in zip(work, logits.split([len(tokens) for _, tokens in work]), strict=True):
            found[name].append(part)
    return {name: torch.cat(parts) for name, parts in found.items()}


CASES = [
    ("llama", 1, "all-linear"),
    ("llama", 2, "all-linear"),
    ("qwen3", 4, "all-linear"),
    ("bloom", 2, "all-linear"),
    ("opt", 2, "all-linear"),
    ("deepseek_v3", 2, LATENT_LINEARS),
    ("qwen3_5_moe_vl", 2, DELTA_LINEARS),
    ("gemma4", 2, GEMMA4_LINEARS),
    ("mistral3", 2, LLAMA_LINEARS),
]
MORE_CASES = [
    ("qwen3_5", 4, DELTA_LINEARS),
    ("qwen3_5_vl", 2, DELTA_LINEARS),
    ("qwen3_next", 2, GROUPED_DELTA_LINEARS),
    ("gemma2", 2, "all-linear"),
    ("gemma3_vision", 2, LLAMA_LINEARS),
    ("gemma4_moe", 2, LLAMA_LINEARS),
    ("gemma4_shared", 4, GEMMA4_LINEARS),
    ("gemma4_unified", 8, LLAMA_LINEARS),
    ("deepseek_v2", 4, ("q_proj", *LATENT_LINEARS)),
    ("glm4_moe_lite", 2, LATENT_LINEARS),
    ("mistral4", 4, LATENT_LINEARS),
    ("mistral3_mistral4", 2, LATENT_LINEARS),
    ("qwen2_5_vl", 2, LLAMA_LINEARS),
    ("qwen2_moe", 2, LLAMA_LINEARS),
    ("qwen3_moe", 4, LLAMA_LINEARS),
    ("glm4_moe", 2, LLAMA_LINEARS),
    ("minimax_m2", 8, LLAMA_LINEARS),
    ("mixtral", 2, LLAMA_LINEARS),
    ("gpt_oss", 2, LLAMA_LINEARS),
    ("phi3", 2, ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
    ("glm4", 2, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj")),
    ("granite", 2, "all-linear"),
    ("smollm3", 2, "all-linear"),
]


def pytest_generate_tests(metafunc):
    if "targets" in metafunc.fixturenames:
        cases = CASES + (MORE_CASES if metafunc.config.getoption("--full-matrix") else [])
        metafunc.parametrize(("kind", "size", "targets"), cases, ids=[f"{kind}-{size}" for kind, size, _ in cases])


def test_logits_are_those_of_merged_weights(tmp_path, kind, size, targets):
    """Also where an adapter is of a model with towers, and has matrices for these too."""
    folder = factory.make_model(tmp_path / "model", kind)
    paths = [
        make_adapter(tmp_path / str(n), folder, rank=rank, seed=n, targets=targets) for n, rank in enumerate((4, 16))
    ]
    groups = [TPGroup.single()] if size == 1 else ThreadGroup.make(size)
    with ThreadPoolExecutor(size) as threads:
        ranks = list(threads.map(lambda tp: drive(folder, tp, paths), groups))
    yardstick = Yardstick(folder)
    for name, tokens in PROMPTS.items():
        path = None if SLOTS[name] < 0 else paths[SLOTS[name]]
        with merged(yardstick.model, path), merged(yardstick.exact, path):
            for rank in ranks:
                yardstick.check(rank[name], tokens)


@pytest.mark.parametrize(
    ("kind", "module"),
    [
        ("qwen3_5_moe", "layers.0.linear_attn.conv1d"),
        ("qwen3_5_moe", "layers.1.mlp.shared_expert_gate"),
        ("qwen3_5_moe_vl", "language_model.layers.1.mlp.gate"),
        ("gemma4_moe", "layers.0.router.proj"),
        ("deepseek_v3", "layers.0.self_attn.kv_b_proj"),
    ],
)
def test_what_cannot_be_adapted_is_refused_by_name(tmp_path, kind, module):
    folder = factory.make_model(tmp_path / "model", kind, num_hidden_layers=2)
    path = Path(make_adapter(tmp_path / "adapter", folder, targets=["o_proj"]))
    edit_config(str(path), target_modules=["o_proj", module.rpartition(".")[2]])
    file = path / "adapter_model.safetensors"
    names = {f"base_model.model.model.{module}.lora_{part}.weight": torch.ones(8, 8) for part in "AB"}
    save_file(load_file(file) | names, file)
    store = AdapterStore(factory.load(folder, enable_lora=True))
    with pytest.raises(ModelError, match=rf"model\.{re.escape(module)} is adapted, and the model has no"):
        store.load(Adapter(0, "x", str(path), adapter_digest(str(path))))


def test_a_step_without_adapters_is_that_of_a_model_without_slots(tmp_path):
    folder = factory.make_model(tmp_path / "model", "qwen3")
    plain, adapted = factory.load(folder), factory.load(folder, enable_lora=True)
    path = make_adapter(tmp_path / "adapter", folder)
    load_adapters(adapted, [path])
    logits = [factory.PagedRunner(model).step([("a", PROMPTS["a"])])[0] for model in (plain, adapted)]
    assert torch.equal(*logits)


def test_ranks_read_what_the_driver_read(tmp_path):
    folder = factory.make_model(tmp_path / "model", "llama")
    path = make_adapter(tmp_path / "adapter", folder)
    digest = adapter_digest(path)
    make_adapter(path, folder, seed=5)
    store = AdapterStore(factory.load(folder, enable_lora=True))
    with pytest.raises(ModelError, match="has other contents here"):
        store.load(Adapter(0, "x", path, digest))
