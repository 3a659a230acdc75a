"""Adapters of a model split over ranks, each a thread: logits of mixed batches are those of merged weights."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import support.model_factory as factory
import torch
from support.adapters import make_adapter, merged
from support.thread_group import ThreadGroup

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
    runner = factory.PagedRunner(model)
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
            few = replace(batch, logit_rows=rows)  # a model may then go on with these tokens alone
            torch.testing.assert_close(model.compute_logits(model(few, runner.caches)), logits[rows], atol=1e-4, rtol=0)
        for (name, _), part in zip(work, logits.split([len(tokens) for _, tokens in work]), strict=True):
            found[name].append(part)
    return {name: torch.cat(parts) for name, parts in found.items()}


# All linear layers of it but those that latent attention takes apart.
DEEPSEEK = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize(
    ("kind", "size", "targets"),
    [
        ("llama", 1, "all-linear"),
        ("llama", 2, "all-linear"),
        ("qwen3", 4, "all-linear"),
        ("bloom", 2, "all-linear"),
        ("opt", 2, "all-linear"),
        ("deepseek_v3", 2, DEEPSEEK),
    ],
)
def test_logits_are_those_of_merged_weights(tmp_path, kind, size, targets):
    from transformers import AutoModelForCausalLM

    folder = factory.make_model(tmp_path / "model", kind)
    paths = [
        make_adapter(tmp_path / str(n), folder, rank=rank, seed=n, targets=targets) for n, rank in enumerate((4, 16))
    ]
    groups = [TPGroup.single()] if size == 1 else ThreadGroup.make(size)
    with ThreadPoolExecutor(size) as threads:
        ranks = list(threads.map(lambda tp: drive(folder, tp, paths), groups))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for name, tokens in PROMPTS.items():
        with merged(model, None if SLOTS[name] < 0 else paths[SLOTS[name]]), torch.no_grad():
            expected = model(torch.tensor([tokens])).logits[0]
        for rank in ranks:
            torch.testing.assert_close(rank[name], expected, atol=2e-3, rtol=1e-3)


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
