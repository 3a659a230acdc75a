"""64 requests through a pool that holds a fifth of them: outputs as with room for all, and nothing left behind.

Half as many on two ranks, whose steps take longer.
"""

from __future__ import annotations

import pytest
import torch

from rayllm import LLM, SamplingParams
from rayllm.api.types import EngineStats

NUM_REQUESTS, NUM_TOKENS, BLOCK_SIZE = 64, 40, 4
LENGTHS = [8 + 7 * i % 40 for i in range(NUM_REQUESTS)]
PROMPTS = [[(37 * i + 11 * j) % 4000 for j in range(length)] for i, length in enumerate(LENGTHS)]
# Greedy and sampled, and pairs of siblings and groups of beams among them.
PARAMS = [
    SamplingParams(use_beam_search=True, n=2, best_of=3, max_tokens=NUM_TOKENS, ignore_eos=True)
    if i % 16 == 5
    else SamplingParams(
        temperature=0.8 * (i % 3 > 0), n=1 + (i % 9 == 1), seed=i, max_tokens=NUM_TOKENS, ignore_eos=True
    )
    for i in range(NUM_REQUESTS)
]


def needed(tp: int) -> int:
    """Blocks of all requests."""
    widths = [params.width for params in PARAMS[: NUM_REQUESTS // tp]]
    return sum(width * -(-(n + NUM_TOKENS) // BLOCK_SIZE) for n, width in zip(LENGTHS, widths, strict=False))


def run(tp: int, **options: object) -> tuple[list[list[list[int]]], EngineStats, int]:
    """(token ids, counters, preemptions as the outputs report them) of all requests on an engine of these options."""
    torch.set_num_threads(1)
    with LLM(
        device="cpu",
        tensor_parallel_size=tp,
        standby_ranks="none",
        block_size=BLOCK_SIZE,
        max_num_seqs=64,
        max_num_batched_tokens=256,
        max_model_len=96,
        skip_tokenizer_init=True,
        **options,
    ) as llm:
        outputs = llm.generate(PROMPTS[: NUM_REQUESTS // tp], PARAMS[: NUM_REQUESTS // tp], use_tqdm=False)
        llm.engine.check_integrity()
        tokens = [[completion.token_ids for completion in output.outputs] for output in outputs]
        return tokens, llm.stats(), sum(output.num_preemptions for output in outputs)


@pytest.fixture(scope="module")
def expected() -> dict[int, list[list[list[int]]]]:
    """By number of ranks, what comes out with room for all."""
    return {}


@pytest.mark.parametrize(
    ("tp", "mode", "caching"),
    [
        (1, "recompute", True),
        (1, "swap", True),
        (1, "cost", False),
        pytest.param(2, "swap", True, marks=pytest.mark.full_matrix),
    ],
)
def test_a_fifth_of_the_room(tp, mode, caching, expected, request):
    if tp > 1:
        request.getfixturevalue("ray_cluster")
    if tp not in expected:
        expected[tp], ample, _ = run(tp, num_gpu_blocks_override=needed(tp))
        assert ample.num_preemptions == 0
    tokens, stats, reported = run(
        tp,
        num_gpu_blocks_override=needed(tp) // 5,
        preemption_mode=mode,
        enable_prefix_caching=caching,
        swap_space=0.25,
    )
    assert tokens == expected[tp]
    print(f"tp={tp} {mode}: {stats.num_preemptions} preemptions, {stats.num_swap_preemptions} of them by swap")
    assert stats.num_preemptions == reported > 10
    swaps = 0 if mode == "recompute" else stats.num_preemptions  # this model computes slowly, on any CPU
    assert stats.num_swap_preemptions == swaps
    assert stats.swapped_in_blocks > 0, "moved by swap, or as the prefix cache's second tier"
    if mode == "recompute":
        assert stats.cpu_prefix_cache_hits > 0
    assert stats.num_used_blocks == stats.num_used_cpu_blocks == stats.num_swapped == stats.num_running == 0
    assert stats.num_total_cpu_blocks > 0
