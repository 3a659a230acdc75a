"""Cache engine and input batch: block copies, and plans turned into tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.stand_ins import cpu_config

from rayllm.api.sampling_params import SamplingParams
from rayllm.api.types import KVBlocks, SequenceData, StepPlan
from rayllm.parallel.tp_group import TPGroup
from rayllm.worker.cache import CacheEngine, LayerPlace, block_bytes
from rayllm.worker.graphs import graph_sizes
from rayllm.worker.inputs import PersistentBatch, build, lay_out
from rayllm.worker.worker import RankModel, most_seqs

CPU = torch.device("cpu")
SHAPE = (2, 4, 8)
PLACES = [LayerPlace(0, layer * 128, SHAPE) for layer in range(3)]


def make_plan(**fields: object) -> StepPlan:
    defaults = {
        "step_id": 0,
        "free_rows": [],
        "new": [],
        "block_updates": [],
        "copies": [],
        "rows": [],
        "num_tokens": [],
        "num_decodes": 0,
        "num_sampled": 0,
    }
    return StepPlan(**{**defaults, **fields})


def make_cache(num_gpu_blocks: int = 6, num_cpu_blocks: int = 4) -> CacheEngine:
    cache = CacheEngine(KVBlocks(num_gpu_blocks, num_cpu_blocks), PLACES, torch.float32, CPU)
    cache.pool.normal_(generator=torch.Generator().manual_seed(0))
    return cache


def test_layers_are_views_of_one_block_major_pool():
    cache = make_cache()
    assert len(cache.layers) == 3
    for i, ((k, v, scales), group) in enumerate(cache.layers):
        assert (scales, group) == (None, 0)
        assert k.shape == v.shape == (6, 2, 4, 8)
        assert torch.equal(k, cache.pool.view(6, 3, 2, *SHAPE)[:, i, 0])
        assert k.data_ptr() == cache.pool[0, 128 * i :].data_ptr()
        assert v.data_ptr() == cache.pool[0, 128 * i + 64 :].data_ptr()
    assert cache.pool[0].is_contiguous()
    assert cache.pool[0].numel() * 4 == block_bytes(PLACES, torch.float32)


def test_groups_share_blocks_and_a_small_one_leaves_the_rest_of_its_blocks_unused():
    places = [LayerPlace(1, 0, SHAPE), LayerPlace(0, 0, SHAPE), LayerPlace(0, 128, (1, 4, 16))]
    cache = CacheEngine(KVBlocks(6, 0), places, torch.float32, CPU)
    assert [layer.group for layer in cache.layers] == [1, 0, 0]
    assert cache.layers[0].kv.k.data_ptr() == cache.layers[1].kv.k.data_ptr(), "the same bytes, in different blocks"
    assert cache.layers[2].kv.k.shape == (6, 1, 4, 16)
    assert cache.pool.shape == (6, 256)
    assert block_bytes(places, torch.float32) == 1024


def test_copies_reach_all_layers_and_nothing_else():
    cache = make_cache()
    before = cache.pool.clone()
    cache.copy([(0, 3), (1, 4)])
    assert torch.equal(cache.pool[3], before[0])
    assert torch.equal(cache.pool[4], before[1])
    for block in (0, 1, 2, 5):
        assert torch.equal(cache.pool[block], before[block])


def test_a_block_survives_the_way_to_the_host_and_back():
    cache = make_cache()
    before = cache.pool.clone()
    cache.swaps.swap_out([(1, 3), (2, 0)])
    cache.pool.fill_(float("nan"))
    cache.swaps.swap_in([(3, 5), (0, 4)])
    assert torch.equal(cache.pool[5], before[1])
    assert torch.equal(cache.pool[4], before[2])


@pytest.fixture
def state() -> PersistentBatch:
    state = PersistentBatch(max_num_seqs=4, max_model_len=32, block_size=4, device=CPU)
    params = SamplingParams()
    state.apply(
        make_plan(
            new=[
                SequenceData(2, list(range(100, 110)), 10, 4, [[7, 3, 5]], params, 0),
                SequenceData(0, list(range(200, 206)), 6, 5, [[1, 2]], params, 0),
            ]
        )
    )
    return state


def test_a_mixed_plan_becomes_packed_tensors(state):
    plan = make_plan(rows=[0, 2], num_tokens=[1, 6], num_decodes=1, num_sampled=2)
    layout = lay_out(state, plan)
    batch = build(state, layout)
    assert batch.input_ids.tolist() == [205, 104, 105, 106, 107, 108, 109]
    assert batch.positions.tolist() == [5, 4, 5, 6, 7, 8, 9]
    assert batch.slot_mappings[0].tolist() == [2 * 4 + 1, 12, 13, 14, 15, 20, 21]
    assert batch.seq_lens.tolist() == [6, 10]
    assert batch.query_start_loc.tolist() == [0, 1, 7]
    assert batch.logit_rows.tolist() == [0, 6]
    assert batch.block_tables[0].tolist() == [[1, 2, 0], [7, 3, 5]]
    assert (batch.num_decodes, batch.max_query_len) == (1, 6)
    assert list(layout.spans()) == [(0, 5, 1, 0), (2, 4, 6, 1)]


def test_building_changes_nothing_and_advancing_counts(state):
    plan = make_plan(rows=[2, 0], num_tokens=[3, 1], num_decodes=0, num_sampled=0)
    before = (state.num_computed.copy(), state.num_tokens.copy(), state.token_table.clone())
    layout = lay_out(state, plan)
    batch = build(state, layout)
    assert np.array_equal(before[0], state.num_computed)
    assert np.array_equal(before[1], state.num_tokens)
    assert torch.equal(before[2], state.token_table)
    assert batch.logit_rows.numel() == 0
    state.advance(layout.rows, layout.counts, plan.num_sampled)
    state.check_integrity()
    assert state.num_computed[[2, 0]].tolist() == [7, 6]
    assert state.num_tokens[[2, 0]].tolist() == [10, 6]


def test_a_row_forgets_its_former_sequence(state):
    state.apply(make_plan(free_rows=[2], new=[SequenceData(2, [9, 8], 2, 0, [[6]], SamplingParams(), 0)]))
    state.apply(make_plan(block_updates=[(2, 1, [[4]])]))
    batch = build(state, lay_out(state, make_plan(rows=[2], num_tokens=[2], num_sampled=1)))
    assert batch.input_ids.tolist() == [9, 8]
    assert batch.slot_mappings[0].tolist() == [24, 25]
    assert state.block_tables[0, 2, :2].tolist() == [6, 4]


def test_a_newest_token_is_replaced_where_the_next_step_reads_it(state):
    before = state.token_table.clone()
    state.advance(np.array([0, 2]), np.array([1, 6]), 2)
    lengths = state.num_tokens[[0, 2]].tolist()
    state.apply(make_plan(tokens=[(2, 77), (0, 66)]))
    assert [int(state.token_table[row, n - 1]) for row, n in zip((0, 2), lengths, strict=True)] == [66, 77]
    changed = (state.token_table != before).nonzero().tolist()
    assert changed == [[0, lengths[0] - 1], [2, lengths[1] - 1]]
    batch = build(state, lay_out(state, make_plan(rows=[2, 0], num_tokens=[1, 1], num_decodes=2, num_sampled=2)))
    assert batch.input_ids.tolist() == [77, 66]


def test_a_table_may_begin_behind_the_window(state):
    data = SequenceData(2, list(range(20)), 18, 17, [[6, 4]], SamplingParams(), 0, first_blocks=[3])
    state.apply(make_plan(free_rows=[2], new=[data], block_updates=[(2, 5, [[9]])]))
    batch = build(state, lay_out(state, make_plan(rows=[2], num_tokens=[3], num_sampled=1)))
    assert batch.slot_mappings[0].tolist() == [4 * 4 + 1, 4 * 4 + 2, 4 * 4 + 3]
    assert batch.block_tables[0][0, 3:].tolist() == [6, 4]
    assert state.block_tables[0, 2, 5] == 9


@pytest.mark.parametrize(
    ("most", "expected"), [(1, [1]), (3, [1, 2, 3]), (16, [1, 2, 4, 8, 16]), (40, [1, 2, 4, 8, 16, 32, 40])]
)
def test_captured_sizes_end_at_the_limit(most, expected):
    assert graph_sizes(most) == expected


@pytest.mark.parametrize(("gib_left", "expected"), [(3, 256), (15, 256), (16, 512), (32, 1024), (110, 1024)])
def test_sequences_take_a_small_share_of_the_memory_for_kv(gib_left, expected):
    """As of a model of 128k tokens of context: about 1 MiB a sequence."""
    assert most_seqs((256, 512, 1024), lambda num_seqs: num_seqs * 2**20, gib_left * 2**30) == expected
    assert most_seqs((7,), lambda num_seqs: num_seqs * 2**40, gib_left * 2**30) == 7


@pytest.mark.parametrize(("options", "expected"), [({}, 32), ({"max_num_seqs": 7}, 7)])
def test_a_rank_on_a_cpu_runs_what_it_is_told_to(options, expected):
    rank = RankModel(cpu_config(num_gpu_blocks_override=9, **options), TPGroup.single(), CPU)
    assert rank.count_blocks() == KVBlocks(9, 0, expected)
    more = [rank.bytes_for_seqs(num_seqs) for num_seqs in (1, 256, 1024)]
    assert more[2] - more[1] > 2 * (more[1] - more[0]) > 0
