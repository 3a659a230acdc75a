"""A model split over ranks, each a thread with a group of the same collectives, equals the whole model."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import support.model_factory as factory
import torch
from support.kinds.common import VOCAB_SIZE
from support.thread_group import ThreadGroup

from rayllm.config.model_folder import load_model_spec
from rayllm.config.model_spec import check_parallel
from rayllm.errors import ModelError
from rayllm.layers.attention import KVCache, LayerCache
from rayllm.layers.experts import Experts
from rayllm.models.loader import Checkpoint
from rayllm.parallel.tp_group import TPGroup
from rayllm.worker.graphs import draw
from rayllm.worker.kv_scales import find_scales
from rayllm_kernels import ops

CPU = torch.device("cpu")


def drive(folder, tp, load_format="auto", **options):
    """Prefill, mixed and decode steps on one rank -> all logits [tokens, vocab]."""
    torch.set_num_threads(1)
    runner = factory.PagedRunner(factory.load(folder, tp, load_format=load_format, seed=7, **options))
    prompt = torch.arange(3, 240, 8).tolist()
    steps = [
        runner.step([("a", prompt), ("b", prompt[:7])]),
        runner.step([("a", [256]), ("c", prompt[::-1])], num_decodes=1),
        runner.step([("c", [258]), ("b", [0]), ("a", [131])], num_decodes=3),
    ]
    return torch.cat([logits for step in steps for logits in step])


def check_rounding(actual, expected):
    """Equal but for another order of sums: those come to 32 units in the last place of the largest logit at most."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=128 * 2.0**-24 * float(expected.abs().max()))


def run_ranks(folder, size, load_format="auto", **options):
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(drive, folder, tp, load_format, **options) for tp in ThreadGroup.make(size)]
        return [future.result(timeout=120) for future in futures]


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("llama", (2, 8)),
        ("mistral", (4,)),
        ("qwen2", (2,)),
        ("qwen3_tied", (4,)),
        ("opt", (4,)),
        ("opt_post", (2,)),
        ("bloom", (2, 4)),
        ("phi3", (2, 8)),
        ("phi4", (4,)),
        ("glm", (4,)),
        ("glm4", (2, 8)),
        ("gemma2", (2, 4)),
        ("gemma3", (2, 4)),
        ("gemma4", (2, 8)),
        ("gemma4_moe", (2, 4)),
        ("gemma4_shared", (4,)),
        ("ministral", (2,)),
        ("ministral3", (4,)),
        ("qwen2_5_vl", (2,)),
        ("smollm3", (4,)),
        ("qwen2_moe", (2, 8)),
        ("qwen3_moe", (2, 4)),
        ("qwen3_5", (2, 4)),
        ("qwen3_5_moe_vl", (2,)),
        ("qwen3_next", (4,)),
        ("mixtral", (4,)),
        ("granite", (2,)),
        ("glm4_moe", (2,)),
        ("minimax_m2", (2, 8)),
        ("deepseek_v3", (2, 4)),
        ("deepseek_v2", (2,)),
        ("glm4_moe_lite", (4,)),
        ("mistral4", (2,)),
        ("gpt_oss", (4,)),
    ],
)
def test_ranks_agree_with_the_whole(tmp_path, kind, sizes):
    """Among them: more ranks than KV heads (llama at 8, mistral at 4) and a vocabulary of 259."""
    layers = {} if kind == "gemma4_shared" else {"num_hidden_layers": 2}
    folder = factory.make_model(tmp_path, kind, **layers)
    whole = drive(folder, TPGroup.single())
    assert whole.shape[1] == VOCAB_SIZE
    for size in sizes:
        ranks = run_ranks(folder, size)
        for logits in ranks[1:]:
            assert torch.equal(logits, ranks[0])
        check_rounding(ranks[0], whole)


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("qwen3_moe", {}),
        ("qwen3_moe", {"num_experts": 6}),  # two ranks of four have one expert more
        ("glm4_moe", {}),
        ("gpt_oss", {}),
        ("gemma4_moe", {}),
    ],
)
def test_ranks_that_share_whole_experts_agree_with_the_whole(tmp_path, kind, overrides):
    folder = factory.make_model(tmp_path, kind, num_hidden_layers=2, **overrides)
    whole = drive(folder, TPGroup.single())
    for size in (2, 4):
        ranks = run_ranks(folder, size, enable_expert_parallel=True)
        for logits in ranks[1:]:
            assert torch.equal(logits, ranks[0])
        check_rounding(ranks[0], whole)


def test_a_rank_reads_its_own_experts_alone(tmp_path, monkeypatch):
    folder = factory.make_model(tmp_path, "qwen3_moe", num_hidden_layers=2)
    read, plain = set(), Checkpoint._view

    def view(self, name, *rest):
        read.add(name)
        return plain(self, name, *rest)

    monkeypatch.setattr(Checkpoint, "_view", view)
    model = factory.load(folder, ThreadGroup.make(4)[1], enable_expert_parallel=True)
    numbers = {int(name.split("experts.")[1].split(".")[0]) for name in read if "experts." in name}
    assert numbers == {2, 3}
    assert {tuple(module.down.shape) for module in model.modules() if isinstance(module, Experts)} == {(2, 96, 48)}


def test_limits_of_expert_parallel(tmp_path):
    experts = load_model_spec(factory.make_model(tmp_path / "a", "qwen3_moe", num_experts=3))
    with pytest.raises(ModelError, match="enable_expert_parallel: 3 experts are too few for 4 ranks"):
        check_parallel(experts, 4, expert_parallel=True)
    odd = load_model_spec(factory.make_model(tmp_path / "b", "qwen3_moe", moe_intermediate_size=49))
    check_parallel(odd, 4, expert_parallel=True)
    with pytest.raises(ModelError, match="experts' intermediate size 49"):
        check_parallel(odd, 4)
    dense = load_model_spec(factory.make_model(tmp_path / "c", "llama"))
    with pytest.raises(ModelError, match="enable_expert_parallel is for mixtures of experts, and LlamaForCausalLM"):
        check_parallel(dense, 2, expert_parallel=True)


def drive_fp8(folder, tp):
    """Prefill and decode over a cache in e4m3, calibrated -> (its scales, all logits [tokens, vocab])."""
    torch.set_num_threads(1)
    model = factory.load(folder, tp)

    def run(batch, caches):
        with torch.inference_mode():
            model(batch, caches)

    scales = find_scales(model, torch.float8_e4m3fn, 8, run)
    runner = factory.PagedRunner(model)
    runner.caches = [
        LayerCache(KVCache(*(part.nan_to_num().to(torch.float8_e4m3fn) for part in cache[:2]), own))
        for (cache, _group), own in zip(runner.caches, scales, strict=True)
    ]
    prompt = torch.arange(3, 240, 8).tolist()
    logits = [*runner.step([("a", prompt), ("b", prompt[:7])]), *runner.step([("b", [3]), ("a", [9])], num_decodes=2)]
    return scales, torch.cat(logits)


@pytest.mark.parametrize("size", [2, 8])
def test_a_cache_in_fp8_is_split_like_any_other(tmp_path, size):
    """Each rank calibrates its own heads, and finds what the whole model would; with 8 ranks, two share a head."""
    folder = factory.make_model(tmp_path, "llama", num_hidden_layers=2)
    scales, whole = drive_fp8(folder, TPGroup.single())
    with ThreadPoolExecutor(size) as pool:
        ranks = [
            each.result(timeout=120) for each in [pool.submit(drive_fp8, folder, tp) for tp in ThreadGroup.make(size)]
        ]
    for layer in range(2):
        for part in range(2):
            parts = torch.cat([own[layer][part] for own, _ in ranks])
            assert torch.equal(parts, scales[layer][part].repeat_interleave(max(1, size // 4)))
    for _, logits in ranks:
        assert torch.equal(logits, ranks[0][1])
        # Where the ranks' sums differ in the last bit, a number may be stored as its neighbour.
        assert (logits - whole).norm() / whole.norm() < 0.02


@pytest.mark.parametrize("kind", ["qwen3", "opt", "bloom", "phi3", "glm4", "qwen3_moe"])
def test_dummy_weights_do_not_depend_on_ranks(tmp_path, kind):
    folder = factory.make_model(tmp_path, kind, num_hidden_layers=2)
    whole = drive(folder, TPGroup.single(), "dummy")
    assert whole.std() > 1e-3
    check_rounding(run_ranks(folder, 2, "dummy")[1], whole)


def test_biases_are_added_once(tmp_path):
    folder = factory.make_model(tmp_path, "llama", attention_bias=True, mlp_bias=True, num_hidden_layers=2)
    check_rounding(run_ranks(folder, 4)[0], drive(folder, TPGroup.single()))


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_draw_what_the_whole_vocabulary_would_give(size):
    """Each from its own slice: 259 tokens in parts of 65, the last one shorter."""
    generator = torch.Generator().manual_seed(1)
    logits = 2 * torch.randn(50, 259, generator=generator)
    seeds, positions = torch.arange(50) * 7919, torch.arange(50) % 11
    temperature, noise_scale = torch.full((50,), 0.8), (torch.arange(50) % 3 > 0).float()
    rows = ops.DrawRows(seeds, positions, temperature, noise_scale)
    shard = -(-259 // size)

    def draw_on(tp):
        first = tp.rank * shard
        return draw(logits[:, first : first + shard], rows, first, tp)

    with ThreadPoolExecutor(size) as pool:
        drawn = [future.result(timeout=60) for future in [pool.submit(draw_on, tp) for tp in ThreadGroup.make(size)]]
    whole = draw(logits, rows, 0, TPGroup.single())
    assert len(whole.unique()) > 10
    for tokens in drawn:
        assert torch.equal(tokens, whole)


def test_interface_of_a_rank(tmp_path):
    folder = factory.make_model(tmp_path, "mistral", num_hidden_layers=2)
    sizes = {}
    for size in (1, 2, 4):
        model = factory.load(folder, ThreadGroup.make(size)[0])
        sizes[size] = model.num_kv_heads_per_rank
    assert sizes == {1: 2, 2: 1, 4: 1}
    with pytest.raises(ModelError, match="tensor_parallel_size 16 does not divide"):
        check_parallel(load_model_spec(folder), 16)
