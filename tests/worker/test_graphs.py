"""What the CUDA graphs compute, run here step by step on the CPU: padding must not show in logits, tokens or cache.

Only capture and replay need a GPU; inputs, padding and the step itself are the same code.
"""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.model_factory import PagedRunner, load, make_model, run_context

from rayllm.api.sampling_params import SamplingParams
from rayllm.api.types import SequenceData, StepPlan
from rayllm.layers.attention import KVCache, LayerCache
from rayllm.sampling.sampling_table import DrawColumns, SamplingTable
from rayllm.worker import graphs as graphs_module
from rayllm.worker.graphs import DecodeGraphs, StepGraphs, graph_sizes, step_graphs
from rayllm.worker.inputs import PersistentBatch
from rayllm.worker.runner import sample_all_ways

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = make_model(tmp_path_factory.mktemp("model"), "qwen3")
    return load(folder)


def tokens(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(250) for _ in range(count)]


STEPS = [  # (decodes, then chunks), and how many decodes there are
    ([("a", tokens(90, 1)), ("b", tokens(20, 2)), ("c", tokens(1, 3)), ("d", tokens(9, 4))], 0),
    ([("b", tokens(1, 5)), ("e", tokens(7, 6))], 1),
    ([("a", tokens(1, 6)), ("e", tokens(30, 7)), ("c", tokens(2, 8))], 1),
    (
        [
            ("c", tokens(1, 15)),
            ("e", tokens(1, 16)),
            ("a", tokens(1, 13)),
            ("b", tokens(1, 12)),
            ("d", tokens(60, 9)),
            ("f", tokens(40, 10)),
        ],
        4,
    ),
    ([("f", tokens(2, 14))], 0),
]


def test_captured_sizes_are_few_and_near_each_other():
    assert graph_sizes(256) == [1, 2, 4, 8, *range(16, 257, 16)]
    assert len(graph_sizes(1024)) == 28
    for most in (1000, 1024, 4096):
        sizes = graph_sizes(most)
        assert sizes[-1] == most
        assert all(after - size <= max(16, size / 4) for size, after in itertools.pairwise(sizes))


@pytest.mark.parametrize(("split_decodes", "num_groups"), [(True, 1), (False, 1), (True, 3)])
@torch.inference_mode()
def test_captured_steps_equal_eager_ones_whatever_ran_before(model, split_decodes, num_groups):
    """Large, small, large: what one step leaves in the buffers must not reach the next."""
    eager, padded = PagedRunner(model), PagedRunner(model, num_blocks=64 * num_groups, num_groups=num_groups)
    context, room = run_context(model, padded.caches, 6, split_decodes=split_decodes, num_groups=num_groups)
    alone, mixed = step_graphs(context, max_tokens=128, logits_room=room)
    ran = []
    for work, decodes in STEPS:
        decodes = decodes if split_decodes else 0
        expected = torch.stack([logits[-1] for logits in eager.step(work)])
        layout = padded.layout(context.batch, work, decodes)
        graphs = alone if alone.fits(layout) else mixed
        assert graphs.fits(layout)
        ran.append(graphs)
        actual = graphs.run(layout)
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)
    assert ran == ([alone, mixed, mixed, mixed, alone] if split_decodes else [alone] * 5)


@pytest.mark.parametrize("kind", ["qwen3_moe", "gemma4"])
def test_what_a_step_costs_is_that_of_the_experts_that_tokens_go_through(tmp_path, kind, monkeypatch):
    """A step is captured for as many tokens as the active parameters allow, not all of them."""
    model = load(make_model(tmp_path, kind))
    every = sum(parameter.numel() for parameter in model.parameters())
    if kind == "qwen3_moe":  # of 8 experts in two layers, 3 are active
        assert model.active_parameters == every - 2 * 5 * 3 * 48 * 96
    else:  # the embeddings of 3 layers, of 24 numbers
        assert model.active_parameters == every - 259 * 3 * 24
    runner = PagedRunner(model)
    context, room = run_context(model, runner.caches, 3)
    monkeypatch.setattr(graphs_module, "CAPTURED_FLOPS", 2 * model.active_parameters * 4096)
    _alone, mixed = step_graphs(context, max_tokens=8192, logits_room=room)
    assert mixed.sizes[-1] == 4096


class FakeMemory:
    """Captures by computing; a replay returns what the capture did."""

    num_captured = 0

    def capture(self, step, mode):
        self.num_captured += 1
        return SimpleNamespace(replay=lambda: None), step()


@torch.inference_mode()
def test_sizes_that_come_again_are_captured_between_steps(model):
    """After a recovery nothing is captured at first. What a size's first steps need is not worth a pause."""
    runner = PagedRunner(model)
    context, room = run_context(model, runner.caches, 3)
    graphs = StepGraphs(DecodeGraphs(context, room), step_graphs(context, max_tokens=128, logits_room=room))
    layout = runner.layout(context.batch, [("a", tokens(40, 1)), ("b", tokens(9, 2))], 0)
    alone, memory = graphs.chunks[0], FakeMemory()
    expected = alone.run(layout).clone()
    captured = []
    for _ in range(3):
        graphs.capture_used(memory)  # the first time after a step that came once
        captured.append(memory.num_captured)
        assert torch.equal(alone.run(layout), expected)
    graphs.capture_used(memory)
    assert captured == [0, 1, 1]
    assert memory.num_captured == 1, "a replay is not captured again"


def test_what_does_not_fit_a_graph(model):
    runner = PagedRunner(model)
    context, room = run_context(model, runner.caches, 3)
    alone, mixed = step_graphs(context, max_tokens=128, logits_room=room)

    def fits(work: list[tuple[str, list[int]]], decodes: int) -> tuple[bool, bool]:
        layout = runner.layout(PersistentBatch(9, 512, 8, CPU), work, decodes)
        return alone.fits(layout), mixed.fits(layout)

    assert fits([("a", tokens(128, 0))], 0) == (True, True)
    assert fits([("a", tokens(129, 0))], 0) == (False, False)
    assert fits([("a", tokens(1, 0)), ("b", tokens(5, 0))], 1) == (False, True)
    assert fits([(name, tokens(2, 0)) for name in "cdef"], 0) == (False, False)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_step_is_not_replayed_that_latent_attention_computes_faster(tmp_path, deterministic, monkeypatch):
    model = load(make_model(tmp_path, "deepseek_v3"), deterministic=deterministic)
    runner = PagedRunner(model)
    context, room = run_context(model, runner.caches, 3, split_decodes=not deterministic)
    alone, _mixed = step_graphs(context, max_tokens=512, logits_room=room)
    spared = 2 * (32 * (200 * 201 // 2) - 0) * 8 * 3  # 2 x 32 - 12 - 20 multiplications a pair, 8 heads, 3 layers
    for flops, replayed in ((spared + 1, True), (spared, deterministic)):
        monkeypatch.setattr(graphs_module, "CAPTURED_FLOPS", flops)
        layout = PagedRunner(model).layout(PersistentBatch(9, 512, 8, CPU), [("a", tokens(200, 0))], 0)
        assert alone.fits(layout) == replayed


@torch.inference_mode()
def test_a_step_of_many_sequences_has_graphs_of_its_own(model):
    """So that a step of few computes logits for few."""
    eager, padded = PagedRunner(model, num_blocks=400), PagedRunner(model, num_blocks=400)
    context, room = run_context(model, padded.caches, 300, max_model_len=64)
    alone, mixed, wide = step_graphs(context, max_tokens=768, logits_room=room)
    first = [(str(number), tokens(2, number)) for number in range(280)]
    then = [(name, tokens(1, 0)) for name, _ in first[:270]] + [("new", tokens(9, 1))]
    for work, decodes in ((first, 0), (then, 270)):
        expected = torch.stack([logits[-1] for logits in eager.step(work)])
        layout = padded.layout(context.batch, work, decodes)
        assert (alone.fits(layout), mixed.fits(layout), wide.fits(layout)) == (False, False, True)
        torch.testing.assert_close(wide.run(layout), expected, atol=1e-4, rtol=0)
    few = padded.layout(context.batch, [("0", tokens(1, 3)), ("new", tokens(3, 4))], 1)
    assert mixed.fits(few)


def test_padding_by_the_first_layers_alone_touches_nothing(model):
    """As before a capture: whatever runs then must leave cache, tokens and logits of later steps as they were."""
    runner = PagedRunner(model)
    context, room = run_context(model, runner.caches, 4, max_model_len=64)
    chunks = step_graphs(context, max_tokens=64, logits_room=room)
    with torch.inference_mode():
        for graphs in (*chunks, DecodeGraphs(context, room)):
            graphs.run_all(runner.caches[: model.spec.num_distinct_layers])
    assert 1 < model.spec.num_distinct_layers <= len(runner.caches)
    assert all(part.isnan().all() for cache, _group in runner.caches for part in (cache.k, cache.v))
    assert not context.batch.token_table[:4].any()


def test_sampling_in_all_ways_is_forgotten(model):
    context, _room = run_context(model, PagedRunner(model).caches, 4, max_model_len=64)
    table = SamplingTable(4, model.spec.vocab_size, [2])
    sample_all_ways(context, table)
    assert table.is_simple(np.arange(4))
    assert not context.batch.token_table.any()
    batch = table.batch(np.arange(4), np.arange(4), CPU)
    assert (batch.draw, batch.cut, batch.penalties, batch.logprobs) == (None,) * 4


def test_a_device_table_may_begin_behind_the_window(model):
    context, _room = run_context(model, PagedRunner(model).caches, 2, max_model_len=64)
    data = SequenceData(1, list(range(34)), 34, 33, [[6, 4]], SamplingParams(), 0, first_blocks=[3])
    context.batch.apply(StepPlan(0, [], [data], [(1, 5, [[9]])], [], [], [], 0, 0))
    assert context.batch.block_tables[0, 1].tolist() == [0, 0, 0, 6, 4, 9, 0, 0]


@pytest.mark.parametrize(("split_decodes", "num_groups"), [(True, 1), (False, 1), (True, 2)])
@torch.inference_mode()
def test_decode_steps_equal_eager_ones_at_every_batch_size(model, split_decodes, num_groups):
    options = {"num_blocks": 64 * num_groups, "num_groups": num_groups}
    eager = PagedRunner(model, **options)
    caches = [
        LayerCache(KVCache(cache.k.zero_(), cache.v.zero_()), group)
        for cache, group in PagedRunner(model, **options).caches
    ]
    context, room = run_context(model, caches, 8, split_decodes=split_decodes, max_model_len=64, num_groups=num_groups)
    state, graphs = context.batch, DecodeGraphs(context, room)
    prompts = {row: tokens(5 + 3 * row, row) for row in range(7)}
    new = []
    for row, ids in prompts.items():
        eager.step([(str(row), ids[:-1])])
        tables = [[*table, 50 + 10 * group + row] for group, table in enumerate(eager.tables[str(row)])]
        new.append(
            SequenceData(row, ids, len(ids), len(ids) - 1, tables, SamplingParams(), 0, first_blocks=[0] * num_groups)
        )
    for (cache, _), (source, _) in zip(caches, eager.caches, strict=True):
        cache.k.copy_(source.k.nan_to_num())
        cache.v.copy_(source.v.nan_to_num())
    plan = StepPlan(0, [], new, [], [], [], [], 0, 0)
    state.apply(plan)
    for rows in ([3], [0, 1, 2, 3, 4, 5, 6], [6, 2, 4], [5, 0]):
        before = [cache.kv.k.clone() for cache in caches]
        expected = torch.stack([eager.step([(str(row), [prompts[row][-1]])])[0][-1] for row in rows])
        positions = np.array([len(prompts[row]) - 1 for row in rows])
        greedy = DrawColumns(
            np.zeros(len(rows), np.int64), np.ones(len(rows), np.float32), np.zeros(len(rows), np.float32)
        )
        logits, token_ids = graphs.run(np.array(rows), positions, greedy)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
        assert token_ids.tolist() == expected.argmax(-1).tolist()
        for i, row in enumerate(rows):
            assert state.token_table[row, positions[i] + 1] == token_ids[i]
            prompts[row].append(int(token_ids[i]))
        changed = sum(int((cache.kv.k != old).any(dim=(1, 3)).sum()) for cache, old in zip(caches, before, strict=True))
        assert changed <= len(rows) * len(caches), "padding wrote into the cache"
