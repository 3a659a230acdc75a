"""Whole steps of a model by the Triton kernels, in the interpreter, padded as captured steps are.

The references give what is expected. Kernels that are right alone may still be handed the wrong rows, or read what
padding left behind. Unwritten slots of the cache hold NaN. On a GPU, tests/gpu compares whole engines instead.
"""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from support.closeness import check_close

from rayllm.api.sampling_params import SamplingParams
from rayllm.api.types import SequenceData, StepPlan
from rayllm.sampling.sampling_table import DrawColumns
from rayllm.worker.graphs import DecodeGraphs, step_graphs
from rayllm_kernels import dispatch

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU, tests/gpu runs whole engines"),
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),  # of padding rows, which hold anything
]
CPU = torch.device("cpu")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("qwen3", False), id="plain"),
        pytest.param(("qwen3", True), id="deterministic"),
        pytest.param(("qwen3_5", False), id="with states"),
        pytest.param(("gemma2", False), id="with soft caps", marks=pytest.mark.full_matrix),
    ],
)
def case(request, tmp_path_factory):
    """(model, whether it is deterministic). fp16: the interpreter cannot multiply bf16 matrices."""
    from support import model_factory

    (kind, deterministic), folder = request.param, tmp_path_factory.mktemp("model")
    model_factory.make_model(folder, kind, num_hidden_layers=2)
    return model_factory.load(folder, dtype="float16", deterministic=deterministic), deterministic


def tokens(count, seed):
    rng = random.Random(seed)
    return [rng.randrange(250) for _ in range(count)]


def assert_near(actual, expected):
    """Up to what two layers of products with sharp weights make of roundings."""
    check_close(actual, expected, terms=96, slack=8)


@torch.inference_mode()
def test_steps_with_chunks(case, full_matrix):
    """Prompts twice as long, over several tiles of keys, with --full-matrix."""
    from support import model_factory

    (model, deterministic), times = case, 2 if full_matrix else 1
    eager = model_factory.PagedRunner(model, dtype=torch.float16)
    padded = model_factory.PagedRunner(model, dtype=torch.float16, num_blocks=128, num_groups=2)
    context, room = model_factory.run_context(model, padded.caches, 6, split_decodes=not deterministic, num_groups=2)
    graphs = step_graphs(context, max_tokens=64 * times, logits_room=room)
    steps = [
        ([("a", tokens(35 * times, 1)), ("b", tokens(10 * times, 2)), ("c", tokens(1, 3))], 0),
        ([("b", tokens(1, 5)), ("a", tokens(1, 6)), ("e", tokens(21 * times, 7)), ("c", tokens(9, 8))], 2),
        ([("e", tokens(1, 9)), ("d", tokens(5, 10))], 1),
    ]
    for work, decodes in steps:
        decodes = 0 if deterministic else decodes
        expected = torch.stack([logits[-1] for logits in eager.step(work)])
        layout = padded.layout(context.batch, work, decodes)
        chosen = next(g for g in graphs if g.fits(layout))
        with dispatch.forced(triton=True):
            actual = chosen.run(layout)
        assert_near(actual, expected)


@torch.inference_mode()
def test_decode_steps(case):
    from support import model_factory

    model, deterministic = case
    eager = model_factory.PagedRunner(model, dtype=torch.float16)
    prompts = {row: tokens(length, row) for row, length in enumerate((5, 150, 8, 64, 1, 33, 17))}
    new = []
    for row, ids in prompts.items():
        if ids[:-1]:
            eager.step([(str(row), ids[:-1])])
        table = [*eager.tables.get(str(row), [[]])[0], *([eager.free[row]] * 2)]
        new.append(SequenceData(row, ids, len(ids), len(ids) - 1, [table], SamplingParams(), 0))
    caches = [copy.deepcopy(cache) for cache in eager.caches]
    context, room = model_factory.run_context(model, caches, 8, split_decodes=not deterministic)
    graphs = DecodeGraphs(context, room)
    plan = StepPlan(0, [], new, [], [], [], [], 0, 0)
    context.batch.apply(plan)
    rows = [1, 4, 0, 6, 3]
    expected = torch.stack([eager.step([(str(row), [prompts[row][-1]])])[0][-1] for row in rows])
    positions = np.array([len(prompts[row]) - 1 for row in rows])
    greedy = DrawColumns(np.zeros(5, np.int64), np.ones(5, np.float32), np.zeros(5, np.float32))
    with dispatch.forced(triton=True):
        logits, token_ids = graphs.run(np.array(rows), positions, greedy)  # padded to 8 rows
    assert_near(logits, expected)
    assert token_ids.tolist() == logits.argmax(-1).tolist()


FP8_BLOCKS = {"quant_method": "fp8", "weight_block_size": [32, 32]}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False},
        }
    },
}


@pytest.mark.parametrize("how", ["blocks", "int4"])
@torch.inference_mode()
def test_steps_with_weights_in_fewer_bits(how, tmp_path, full_matrix):
    """Of one token and of several, by one layer, or two with --full-matrix. A number between two of fp8 may fall to
    either side, which shows in what follows.
    """
    from support import model_factory, quantised

    folder = tmp_path / "model"
    model_factory.make_model(folder, "qwen3_moe", num_hidden_layers=2 if full_matrix else 1)
    if how == "blocks":
        quantised.quantise(folder, FP8_BLOCKS, lambda weight: quantised.fp8(weight, (32, 32)))
    else:
        quantised.quantise(folder, INT4, lambda weight: quantised.packed(weight, 32, 4, symmetric=False))
    model = model_factory.load(folder, dtype="float16")
    ours, theirs = (model_factory.PagedRunner(model, dtype=torch.float16) for _ in range(2))
    for work, decodes in (([("a", tokens(20, 1)), ("b", tokens(3, 2))], 0), ([("a", tokens(1, 3))], 1)):
        expected = torch.cat(theirs.step(work, num_decodes=decodes)).float()
        with dispatch.forced(triton=True):
            actual = torch.cat(ours.step(work, num_decodes=decodes)).float()
        error = (actual - expected).square().mean().sqrt() / expected.std()
        assert error < (0.01 if how == "int4" else 0.1)  # experts round twice more than a dense layer
