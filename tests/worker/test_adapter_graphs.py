"""Captured steps with adapters, run step by step on the CPU: as eager ones, and another adapter captures nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.adapters import make_adapter
from support.model_factory import PagedRunner, load, make_model, run_context

from rayllm.api.sampling_params import SamplingParams
from rayllm.api.types import Adapter, SequenceData, StepPlan
from rayllm.config.lora import adapter_digest
from rayllm.sampling.sampling_table import DrawColumns
from rayllm.worker.adapters import AdapterStore
from rayllm.worker.graphs import DecodeGraphs, make_graphs, step_graphs
from rayllm.worker.inputs import PersistentBatch, StepLayout, build

PROMPTS = {"a": [5, 9, 77, 3, 8], "b": [40, 41, 42], "c": [100, 90, 80, 70, 60, 50, 40]}
SLOTS = {"a": 1, "b": -1, "c": 0}


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    path = make_model(folder / "model", "llama")
    model = load(path, enable_lora=True, max_loras=2)
    store = AdapterStore(model)
    for number in range(3):
        adapter = make_adapter(folder / str(number), path, rank=4 * (number + 1), seed=number)
        store.load(Adapter(number, str(number), adapter, adapter_digest(adapter)))
    return model, store


def fill(store, first, second):
    store.put(0, first)
    store.put(1, second)


def set_slots(state: PersistentBatch, runner: PagedRunner) -> None:
    """As a plan's new sequences do."""
    new = [
        SequenceData(
            runner.rows[name], PROMPTS[name], 1, 0, runner.tables[name], SamplingParams(), 0, adapter_slot=slot
        )
        for name, slot in SLOTS.items()
    ]
    state.apply(StepPlan(0, [], new, [], [], [], [], 0, 0))


@pytest.mark.parametrize("adapters", [(0, 1), (2, 0)])
@torch.inference_mode()
def test_prompts_and_then_decodes(case, adapters):
    model, store = case
    fill(store, *adapters)
    eager, padded = PagedRunner(model), PagedRunner(model)
    context, room = run_context(model, padded.caches, 4, max_model_len=64)
    alone, mixed = step_graphs(context, max_tokens=64, logits_room=room, adapted=True)
    decodes = DecodeGraphs(context, room, adapted=True)
    work = list(PROMPTS.items())
    layout = padded.layout(context.batch, work, 0)
    set_slots(context.batch, padded)
    assert context.batch.has_adapters(layout.rows)
    slots = torch.tensor([SLOTS[name] for name, tokens in work for _ in tokens], dtype=torch.int32)
    batch = replace(eager.batch(work, 0, 0), adapter_slots=slots)
    expected = model.compute_logits(model(batch, eager.caches))
    before = alone.run(layout).clone()
    torch.testing.assert_close(before, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(mixed.run(layout), expected, atol=1e-4, rtol=0)
    assert torch.equal(build(context.batch, layout).adapter_slots, slots)

    rows = np.array([padded.rows[name] for name in PROMPTS])
    for name, tokens in PROMPTS.items():
        context.batch.token_table[padded.rows[name], len(tokens)] = 33
    following = [(name, [33]) for name in PROMPTS]
    batch = replace(eager.batch(following, 3, 0), adapter_slots=torch.tensor(list(SLOTS.values()), dtype=torch.int32))
    expected = model.compute_logits(model(batch, eager.caches))
    for cache, source in zip(padded.caches, eager.caches, strict=True):  # both runners shuffle their blocks alike
        cache.kv.k.copy_(source.kv.k)
        cache.kv.v.copy_(source.kv.v)
    greedy = DrawColumns(np.zeros(3, np.int64), np.ones(3, np.float32), np.zeros(3, np.float32))
    positions = np.array([len(tokens) for tokens in PROMPTS.values()])
    logits, _ids = decodes.run(rows, positions, greedy)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@torch.inference_mode()
def test_steps_without_adapters_have_graphs_without_them(case):
    model, store = case
    fill(store, 0, 1)
    runner = PagedRunner(model)
    context, _room = run_context(model, runner.caches, 4, max_model_len=64)
    graphs = make_graphs(context, 64)
    assert graphs.adapted is not None and graphs.adapted.decodes is not None
    work = [("b", PROMPTS["b"])]
    layout = runner.layout(context.batch, work, 0)
    assert not context.batch.has_adapters(layout.rows)
    assert build(context.batch, layout).adapter_slots is None
    first = graphs.chunks[0].run(layout).clone()
    assert model.build.adapters.is_idle
    torch.testing.assert_close(graphs.adapted.chunks[0].run(layout), first, atol=1e-4, rtol=0)
    assert not model.build.adapters.is_idle


def test_rows_change_their_adapters():
    state = PersistentBatch(4, 64, 8, torch.device("cpu"))

    def enter(row: int, slot: int) -> None:
        data = SequenceData(row, [1, 2], 2, 0, [[0]], SamplingParams(), 0, adapter_slot=slot)
        state.apply(StepPlan(0, [], [data], [], [], [], [], 0, 0))

    enter(1, 0)
    enter(2, 3)
    assert state.adapter_table.tolist() == [-1, 0, 3, -1, -1]
    enter(1, -1)
    assert state.adapter_table.tolist() == [-1, -1, 3, -1, -1]
    assert [state.has_adapters(np.array([row])) for row in range(4)] == [False, False, True, False]
    layout = StepLayout(np.array([1, 2]), np.array([2, 1]), np.array([0, 1]), 0, 2)
    assert build(state, layout).adapter_slots.tolist() == [-1, -1, 3]
