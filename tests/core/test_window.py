"""Sliding windows: which blocks are let go, what that makes possible, and that nothing is lost by it."""

from __future__ import annotations

import random
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fakes import VOCAB
from support.model_factory import make_model
from support.scheduler import CHEAP, DEAR, Harness

from rayllm import LLM, SamplingParams
from rayllm.config.kv_groups import kv_groups
from rayllm.config.model_folder import load_model_spec
from rayllm.core.memory import KVWindow, longest
from rayllm.errors import ConfigError


@given(tokens=st.integers(1, 40), size=st.integers(1, 9), position=st.integers(0, 90))
def test_blocks_are_kept_as_long_as_a_token_can_see_them(tokens, size, position):
    window = KVWindow(tokens, size)
    seen = range(max(0, position - tokens + 1), position + 1)
    boundary = position - position % size
    assert window.first_block(position) == max(0, boundary - tokens + 1) // size <= seen.start // size
    held = [p // size - window.first_block(p) + 1 for p in range(position + 1)]
    assert window.most_blocks(position + 1) >= max(held)
    assert window.most_blocks(sys.maxsize) == max(
        p // size - window.first_block(p) + 1 for p in range(tokens * size * 2)
    )


def test_without_a_window_everything_is_kept():
    window = KVWindow(None, 4)
    assert (window.first_block(1000), window.most_blocks(1001), longest((window,), 3)) == (0, 251, 12)
    assert longest((KVWindow(9, 4),), 3) == sys.maxsize, "three blocks hold any 9 tokens in a row"
    assert longest((KVWindow(10, 4),), 3) == 12


def make(num_blocks: int, window: int = 16, **options: object) -> Harness:
    return Harness(**{"num_blocks": num_blocks, "block_size": 4, "windows": (window,), "max_model_len": 400, **options})


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("caching", [True, False])
def test_a_long_prompt_takes_a_window_and_a_chunk(depth, caching):
    harness = make(100, depth=depth, caching=caching, max_num_batched_tokens=20)
    harness.add("a", prompt_of(300), max_tokens=60, seed=1, ignore_eos=True)
    most = 0
    while harness.step():
        most = max(most, harness.scheduler.stats().num_used_blocks)
    harness.check_done()
    assert most <= (16 + 20 + 2) // 4 + 1, "of 90 blocks in all"


def test_a_pool_of_one_window_serves_any_length():
    harness = make(5)
    harness.add("a", prompt_of(200), max_tokens=60, seed=1, ignore_eos=True)
    harness.add("b", prompt_of(90, 1), max_tokens=30, seed=2, n=2, ignore_eos=True)
    harness.run()
    harness.check_done()


def test_a_later_prompt_needs_the_last_window_only():
    """The pool holds half of the prompt: its beginning has long been overwritten when it comes again."""
    harness = make(40, max_num_batched_tokens=32)
    prompt = prompt_of(300)
    harness.add("a", prompt, max_tokens=2, seed=1, ignore_eos=True)
    harness.run()
    computed = harness.worker.num_tokens_computed
    harness.add("b", prompt, max_tokens=2, seed=1, ignore_eos=True)
    harness.run()
    assert harness.worker.num_tokens_computed - computed == 4 + 1, "the last block's tokens and one more"
    assert harness.last_deltas["b", 0].num_cached_tokens == 0, "said with the first token"
    assert harness.scheduler.stats().prefix_cache_hits == 296
    harness.add("c", [*prompt[:100], *prompt_of(40, 5)], max_tokens=2, seed=1, ignore_eos=True)
    harness.run()
    assert harness.scheduler.stats().prefix_cache_hits == 296, "the window before token 100 is gone"
    harness.check_done()


def test_a_later_prompt_may_begin_in_the_middle():
    harness = make(100, max_num_batched_tokens=64)
    prompt = prompt_of(120)
    harness.add("a", prompt, max_tokens=2, seed=1, ignore_eos=True)
    harness.run()
    harness.add("b", [*prompt[:62], *prompt_of(20, 5)], max_tokens=2, seed=1, ignore_eos=True)
    harness.run()
    harness.check_done()
    data = harness.plans[-2].new[0]
    assert (data.num_computed_tokens, data.first_blocks) == (60, [11]), "token 60 sees tokens 45 to 60"
    assert len(data.block_tables[0]) == 4 + 1, "and a block for the next chunk to begin with"


@pytest.mark.parametrize(("mode", "costs"), [("swap", DEAR), ("cost", CHEAP), ("recompute", DEAR)])
@pytest.mark.parametrize("caching", [True, False])
def test_only_the_window_is_swapped(mode, costs, caching):
    harness = make(
        8,
        policy="priority",
        max_num_seqs=1,
        preemption_mode=mode,
        costs=costs,
        num_cpu_blocks=6,
        caching=caching,
        max_num_batched_tokens=12,
    )
    harness.add("low", prompt_of(100), priority=1, max_tokens=50, seed=1, ignore_eos=True)
    for _ in range(30):
        harness.step()
    harness.add("high", prompt_of(60, 3), priority=0, max_tokens=20, seed=2, ignore_eos=True)
    harness.step()
    stats = harness.scheduler.stats()
    assert (stats.num_swapped, stats.num_used_cpu_blocks) == ((0, 0) if mode == "recompute" else (1, 4))
    harness.run()
    harness.check_done()
    assert harness.scheduler.stats().num_preemptions == 1


def test_siblings_share_the_window_of_the_prompt():
    harness = make(100, max_num_seqs=8, max_num_batched_tokens=40)
    harness.add("a", prompt_of(203), n=8, max_tokens=40, seed=1, ignore_eos=True)
    while not harness.outputs:
        harness.step()
    harness.step()
    stats = harness.scheduler.stats()
    assert stats.num_running == 8
    assert stats.num_used_blocks <= 15 + 7, "the last chunk, its window, and an own block for each of 7 siblings"
    harness.run()
    harness.check_done()


def generate(folder: str, **options: object) -> tuple[list[list[int]], int]:
    """Greedy tokens of prompts that are much longer than the window, and the longest a sequence may be."""
    prompts = [prompt_of(length, length) for length in (200, 30, 120)]
    with LLM(folder, device="cpu", skip_tokenizer_init=True, block_size=8, **options) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True), use_tqdm=False)
        llm.engine.check_integrity()
        return [output.outputs[0].token_ids for output in outputs], llm.engine.info.max_model_len


def test_a_model_with_windows_in_a_pool_smaller_than_its_prompts(tmp_path):
    """window 24: positions p - 23 to p lie in at most 4 blocks of 8."""
    folder = make_model(tmp_path, "mistral")
    ample = generate(folder)
    assert generate(folder, num_gpu_blocks_override=9, max_num_batched_tokens=40, swap_space=0.01) == ample
    assert generate(folder, num_gpu_blocks_override=4) == ample
    with pytest.raises(ConfigError, match="max_model_len 200 does not fit into the KV cache of 24 tokens"):
        generate(folder, num_gpu_blocks_override=3, max_model_len=200)


@pytest.mark.parametrize(
    ("options", "windows"),
    [
        ({"sliding_window": None}, [None]),
        ({}, [24]),
        ({"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, [None, 16, 16]),
        ({"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}, [16]),
    ],
)
def test_blocks_are_let_go_if_every_layer_of_their_group_has_a_window(tmp_path, options, windows):
    folder = make_model(tmp_path, "qwen2" if "use_sliding_window" in options else "mistral", **options)
    assert [group.window for group in kv_groups(load_model_spec(folder), 1)] == windows
