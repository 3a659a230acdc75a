"""Pools that are too small, on CUDA in the deterministic mode: the same tokens as with room for all, to the bit."""

from __future__ import annotations

import random

import pytest
import torch
from e2e.test_kv_pressure import BLOCK_SIZE, PARAMS, PROMPTS, needed

from rayllm import LLM, SamplingParams
from rayllm.api.types import EngineStats

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

USERS, TURNS, MESSAGE, ANSWER = 24, 6, 60, 20


def engine(**options: object) -> LLM:
    return LLM(
        device="cuda",
        dtype="bfloat16",
        deterministic=True,
        block_size=BLOCK_SIZE,
        max_num_seqs=64,
        max_num_batched_tokens=256,
        max_model_len=600,
        skip_tokenizer_init=True,
        **options,
    )


def run(**options: object) -> tuple[list[list[list[int]]], EngineStats]:
    with engine(**options) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        llm.engine.check_integrity()
        return [[completion.token_ids for completion in output.outputs] for output in outputs], llm.stats()


@pytest.fixture(scope="module")
def expected() -> list[list[list[int]]]:
    tokens, stats = run(num_gpu_blocks_override=needed(1))
    assert stats.num_preemptions == 0
    return tokens


@pytest.mark.parametrize("enforce_eager", [True, False])
@pytest.mark.parametrize("mode", ["recompute", "swap", "cost"])
def test_a_fifth_of_the_room(mode, enforce_eager, expected):
    tokens, stats = run(
        num_gpu_blocks_override=needed(1) // 5, preemption_mode=mode, swap_space=0.25, enforce_eager=enforce_eager
    )
    assert tokens == expected
    print(f"{mode}: {stats.num_preemptions} preemptions, {stats.num_swap_preemptions} of them by swap")
    assert stats.num_preemptions > 10
    if mode != "cost":
        assert stats.num_swap_preemptions == (stats.num_preemptions if mode == "swap" else 0)
    assert stats.num_used_blocks == stats.num_used_cpu_blocks == stats.num_swapped == stats.num_running == 0


def chats(**options: object) -> tuple[list[list[int]], EngineStats]:
    """Every user's history after all turns, and what the engine counted."""
    rng = random.Random(0)
    histories = [[rng.randrange(4, 4000) for _ in range(40 + user)] for user in range(USERS)]
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
    with engine(**options) as llm:
        for _ in range(TURNS):
            for first in range(0, USERS, 4):  # four at a time
                some = histories[first : first + 4]
                for history in some:
                    history += [rng.randrange(4, 4000) for _ in range(MESSAGE)]
                for history, output in zip(some, llm.generate(some, params, use_tqdm=False), strict=True):
                    history += output.outputs[0].token_ids
        llm.engine.check_integrity()
        return histories, llm.stats()


def test_chats_over_two_tiers():
    """Blocks leave the device while others are computed, ahead of their reuse or because of it, and come back."""
    blocks = USERS * -(-(64 + TURNS * (MESSAGE + ANSWER)) // BLOCK_SIZE)
    ample, alone = chats(num_gpu_blocks_override=2 * blocks)
    assert alone.swapped_out_blocks == 0
    tight, stats = chats(num_gpu_blocks_override=blocks // 4, swap_space=0.5)
    assert tight == ample
    assert stats.cpu_prefix_cache_hits > stats.prefix_cache_hits // 2
    assert stats.swapped_out_blocks > blocks // 2 and stats.swapped_in_blocks > blocks
