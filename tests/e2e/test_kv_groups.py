"""Models whose layers have windows of their own, shorter than the prompts, against transformers in float32 on the CPU:
small pools, forks, beams, chunks, prefix caching, and workers that are lost. With `--full-matrix` also models whose
cache holds something else, in all combinations.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from support.kinds.common import EOS, PAD
from support.model_factory import make_model
from support.yardstick import transformers_model

from rayllm import LLM, SamplingParams
from rayllm.api.types import EngineStats, GenerationRequest, KVBlocks, StepPlan
from rayllm.config.kv_groups import kv_groups
from rayllm.config.options import EngineConfig
from rayllm.config.resolved import ResolvedConfig, resolve
from rayllm.core.check import check_scheduler
from rayllm.core.memory import KVWindow, most_blocks
from rayllm.engine.engine import EngineCore
from rayllm.errors import ConfigError, EngineDeadError
from rayllm.executor.local import LocalExecutor
from rayllm.parallel.tp_group import TPGroup
from rayllm.text.outputs import OutputProcessor
from rayllm.worker.worker import RankModel

WINDOW, NUM_TOKENS = 24, 24
WINDOWED = {"use_sliding_window": True, "sliding_window": WINDOW, "num_hidden_layers": 5}
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
# Groups of one layer and of two; in the latter one block in five is half empty. Layers with a recurrent state take part
# in the same: their blocks hold 12 tokens where 4 are asked for, and 16 where 8 are.
MODELS = {
    "first layers full": ("qwen2", {**WINDOWED, "max_window_layers": 1}, 5),
    "layer types": ("qwen3", {**WINDOWED, "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL]}, 3),
    "states": ("qwen3_5", {"layer_types": [LINEAR, LINEAR, FULL, LINEAR], "num_hidden_layers": 4}, 4),
}
MORE_MODELS = {
    "states of key heads": ("qwen3_next", {}, 3),
    "states of a mixture": ("qwen3_5_moe", {"layer_types": [LINEAR, LINEAR, FULL], "num_hidden_layers": 3}, 3),
    "latent": ("deepseek_v3", {}, 1),
    "latent, scaled queries": ("mistral4", {}, 1),
    "sinks": ("gpt_oss", {}, 2),
    "caps": ("gemma2", {"tie_word_embeddings": False}, 3),
    "keys of others": ("gemma4_shared", {"tie_word_embeddings": False}, 2),
    "mixture of two shapes": ("gemma4_moe", {"tie_word_embeddings": False}, 3),
}
SMALL_POOLS = [
    ("first layers full", "recompute", True),
    ("first layers full", "swap", False),
    ("layer types", "recompute", False),
    ("layer types", "swap", True),
    ("states", "recompute", False),
    ("states", "swap", False),
]
# The same, because only one token is left.
FOUR = SamplingParams(n=4, temperature=1.0, top_k=1, max_tokens=NUM_TOKENS, ignore_eos=True)
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
BEAMS = SamplingParams(use_beam_search=True, best_of=4, n=3, max_tokens=10, ignore_eos=True)
BEAM_PROMPTS = 2  # of the prompts, the first


@dataclass
class Case:
    folder: str
    prompts: list[list[int]]
    expected: list[list[int]]
    beams: list[list[list[int]]]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    full = metafunc.config.getoption("--full-matrix")
    names = [*MODELS, *MORE_MODELS] if full else list(MODELS)
    if "mode" in metafunc.fixturenames:
        every = list(itertools.product(names, ("recompute", "swap"), (True, False)))
        # With their beginnings in the cache too few states are needed; test_parity.py has smaller pools for that.
        every = [case for case in every if not (case[0].startswith("states") and case[2])]
        metafunc.parametrize(("name", "mode", "caching"), every if full else SMALL_POOLS)
    elif "name" in metafunc.fixturenames:
        metafunc.parametrize("name", names)


@pytest.fixture(scope="module")
def case_of(tmp_path_factory) -> Callable[[str], Case]:
    torch.set_num_threads(1)
    every = MODELS | MORE_MODELS
    return functools.cache(lambda name: make_case(tmp_path_factory.mktemp("model"), *every[name][:2]))


def make_case(folder, kind: str, overrides: dict) -> Case:
    make_model(folder, kind, **overrides)
    rng = random.Random(kind)
    shared = [rng.randrange(EOS - 1) for _ in range(120)]
    prompts = [[rng.randrange(EOS - 1) for _ in range(length)] for length in (61, 5, 28, 40, 1, 24, 25, 200, 90, 130)]
    prompts += [[*shared[:n], n] for n in (120, 119, 90, 60, 30, 8)]  # something for the prefix cache
    model = transformers_model(folder)

    options = {"device": "cpu", "skip_tokenizer_init": True, "max_num_seqs": 24, "max_model_len": 256}
    with LLM(str(folder), **options) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    expected = [output.outputs[0].token_ids for output in outputs]
    assert len({tuple(tokens) for tokens in expected}) > 12, "the reference says the same to every prompt"
    assert sum(len(set(tokens)) > 4 for tokens in expected) > 12, "the reference repeats the last token"
    for prompt, tokens in zip(prompts, expected, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + tokens])).logits[0]
        assert tokens == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    beams = []
    for prompt in prompts[:BEAM_PROMPTS]:
        ids = torch.tensor([prompt])
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=BEAMS.max_tokens,
            num_beams=BEAMS.best_of,
            num_return_sequences=BEAMS.n,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=PAD,
        )
        beams.append(found[:, len(prompt) :].tolist())
    return Case(str(folder), prompts, expected, beams)


def check(case: Case, *, repeats: int = 1, **options: object) -> EngineStats:
    """Greedy requests with one and with four completions, and beam searches, all at once; the same again, if asked."""
    options = {"device": "cpu", "skip_tokenizer_init": True, "max_num_seqs": 24, "max_model_len": 256, **options}
    params = [GREEDY if i % 4 else FOUR for i in range(len(case.prompts))]
    with LLM(case.folder, **options) as llm:
        for _ in range(repeats):
            prompts = case.prompts + case.prompts[:BEAM_PROMPTS]
            outputs = llm.generate(prompts, params + [BEAMS] * BEAM_PROMPTS, use_tqdm=False)
            for output, expected in zip(outputs, case.expected, strict=False):
                assert {tuple(completion.token_ids) for completion in output.outputs} == {tuple(expected)}
            for output, expected in zip(outputs[len(params) :], case.beams, strict=True):
                assert [completion.token_ids for completion in output.outputs] == expected
            check_scheduler(llm.engine.scheduler)
        stats = llm.stats()
    assert stats.num_used_blocks == stats.num_used_cpu_blocks == stats.num_swapped == 0
    return stats


def windows_of(case: Case) -> list[int | None]:
    """Of each group."""
    return [window.tokens for window in kv_windows(case, 16)]


def kv_windows(case: Case, block_size: int) -> list[KVWindow]:
    """Of each group, for an engine that is asked for this block size."""
    config = resolve(EngineConfig(model=case.folder, device="cpu", block_size=block_size), 0)
    return [KVWindow(group.window, config.block_size) for group in kv_groups(config.spec, 1)]


@pytest.mark.parametrize("caching", [True, False])
def test_with_room_for_all(case_of, name, caching):
    case = case_of(name)
    windows = kv_windows(case, 8)
    assert len(windows) == (MODELS | MORE_MODELS)[name][2]
    stats = check(case, repeats=2, enable_prefix_caching=caching, block_size=8)
    assert stats.num_preemptions == 0
    # Prompts that came before, to their last whole block.
    size = windows[0].block_size
    least = sum((len(prompt) - 1) // size * size for prompt in case.prompts + case.prompts[:BEAM_PROMPTS])
    assert stats.prefix_cache_hits >= least if caching else stats.prefix_cache_hits == 0


def test_in_chunks(case_of, name):
    """Of 16 tokens; where states are kept, a block is no divisor of that, so that chunks begin within blocks."""
    stats = check(case_of(name), repeats=2 if name == "states" else 1, max_num_batched_tokens=16, block_size=4)
    assert stats.prefix_cache_hits > 0


def test_in_a_pool_for_little_more_than_the_longest(case_of, name, mode, caching):
    whole = case_of(name)
    windows = kv_windows(whole, 4)
    # Admission leaves a block of each group, and most of those are of states: it takes many short ones, that grow.
    order = list(range(10))
    if windows[0].block_size > 4:
        order += [i for i in order if len(whole.prompts[i]) < 30] * 5
    stats = check(
        Case(whole.folder, [whole.prompts[i] for i in order], [whole.expected[i] for i in order], whole.beams),
        block_size=4,
        num_gpu_blocks_override=most_blocks(windows, 256) + 10,
        max_num_batched_tokens=64,
        preemption_mode=mode,
        enable_prefix_caching=caching,
        swap_space=0.05,
    )
    print(f"{name}: {stats.num_preemptions} preemptions, {stats.num_swap_preemptions} of them by swap")
    assert stats.num_preemptions > 3
    assert (stats.num_swap_preemptions > 3) == (mode == "swap")


def test_heads_of_other_sizes_and_keys_of_other_layers(tmp_path):
    """Gemma 4 in chunks and in a pool for little more than the longest, with blocks of two sizes of heads."""
    case = make_case(tmp_path, "gemma4_shared", {"tie_word_embeddings": False})
    assert windows_of(case) == [WINDOW, None]
    stats = check(
        Case(case.folder, case.prompts[:10], case.expected[:10], case.beams),
        block_size=4,
        num_gpu_blocks_override=81,
        max_num_batched_tokens=16,
        preemption_mode="swap",
        swap_space=0.05,
    )
    assert stats.num_swap_preemptions > 0


def test_the_size_that_is_told_is_that_of_the_longest_sequences(case_of):
    """In blocks of 4, 256 tokens need 64 + 4 * 7 blocks."""
    options = {"device": "cpu", "skip_tokenizer_init": True, "block_size": 4}
    folder = case_of("first layers full").folder
    with LLM(folder, num_gpu_blocks_override=184, max_model_len=256, **options) as llm:
        assert llm.engine.info.num_kv_tokens == 512
    with LLM(folder, num_gpu_blocks_override=91, **options) as llm:
        assert llm.engine.info.max_model_len == 252
    with pytest.raises(
        ConfigError, match="256 does not fit into the KV cache of 91 blocks for 5 groups of layers, 252"
    ):
        LLM(folder, num_gpu_blocks_override=91, max_model_len=256, **options)
    with pytest.raises(ConfigError, match="not a single block of a sequence fits into the KV cache of 4 blocks"):
        LLM(folder, num_gpu_blocks_override=4, **options)


class LosingExecutor(LocalExecutor):
    """Loses its worker, with all KV, at some plans, and takes another."""

    can_recover = True

    def __init__(self, config: ResolvedConfig, every: int):
        super().__init__(config)
        self._every, self._num_plans = every, 0

    def start(self) -> KVBlocks:
        self._blocks = super().start()
        return self._blocks

    def submit(self, plan: StepPlan) -> None:
        self._num_plans += 1
        if self._num_plans % self._every == 0:
            raise EngineDeadError("the worker is lost")
        super().submit(plan)

    def recover(self) -> None:
        self._worker = RankModel(self._config, TPGroup.single(), torch.device("cpu")).build(self._blocks, resumes=True)


def test_new_workers_go_on_where_the_old_ones_were(case_of, name):
    case = case_of(name)
    options = {"device": "cpu", "block_size": 4, "max_num_batched_tokens": 96, "max_num_seqs": 8}
    config = resolve(EngineConfig(model=case.folder, **options), 0)
    executor = LosingExecutor(config, 11)
    core = EngineCore(config, executor, executor.start())
    processor, tokens = OutputProcessor(None), {}
    for i, prompt in enumerate(case.prompts):
        request = GenerationRequest(request_id=str(i), prompt_token_ids=prompt, params=GREEDY)
        core.add(request)
        processor.add(request)
    while core.has_work():
        outputs, _aborts = processor.process(core.step())
        core.check_integrity()
        for output in outputs:
            tokens.setdefault(output.request_id, []).extend(output.outputs[0].token_ids)
    assert core.stats().num_recoveries > 3
    assert [tokens[str(i)] for i in range(len(case.prompts))] == case.expected
    core.shutdown()
