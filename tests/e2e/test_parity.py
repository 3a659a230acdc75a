"""Greedy tokens of the whole engine against `transformers.generate`: 16 prompts, 64 tokens each, float32 on the CPU.

`pytest --full-matrix` runs every combination at every number of ranks; without it tp > 1 covers each option of each
model at least once.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support.kinds.common import EOS, VOCAB_SIZE
from support.model_factory import make_model

from rayllm import LLM, SamplingParams

KINDS = ("llama3_rope", "mistral", "qwen2", "qwen3", "opt")
MORE_KINDS = ("glm4", "phi3", "ministral3", "granite", "smollm3")  # beside glm4 only with --full-matrix
BUDGETS, CACHING, BLOCK_SIZES = (16, 2048), (True, False), (1, 8, 16)
NUM_TOKENS = 64
OPTIONS = list(itertools.product(BUDGETS, CACHING, BLOCK_SIZES))


@dataclass
class Case:
    folder: str
    prompts: list[list[int]]
    expected: list[list[int]]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    torch.set_num_threads(1)
    return {kind: make_case(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


def make_case(folder: Path, kind: str) -> Case:
    from transformers import AutoModelForCausalLM

    make_model(folder, kind)
    rng = random.Random(kind)
    shared = [rng.randrange(EOS - 1) for _ in range(90)]
    prompts = [[rng.randrange(EOS - 1) for _ in range(rng.randint(1, 200))] for _ in range(12)]
    prompts += [[*shared[:n], n] for n in (40, 64, 80, 90)]  # something for the prefix cache
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=VOCAB_SIZE - 1,
        )
        expected.append(out[0, len(prompt) :].tolist())
    assert len({tuple(tokens) for tokens in expected}) > 12, "the reference says the same to every prompt"
    return Case(str(folder), prompts, expected)


def check(case: Case, **options: object) -> LLM:
    """Generate with an engine of these options and compare; returns the engine, shut down, for its counters."""
    options = {"device": "cpu", "skip_tokenizer_init": True, **options}
    with LLM(case.folder, **options) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        outputs = llm.generate(case.prompts, params, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == case.expected
        llm.engine.check_integrity()
        assert llm.stats().num_used_blocks == 0
        stats = llm.stats()
    return stats


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("budget", "caching", "block_size"), OPTIONS)
def test_tp1(cases, kind, budget, caching, block_size):
    check(cases[kind], max_num_batched_tokens=budget, enable_prefix_caching=caching, block_size=block_size)


@pytest.mark.parametrize("kind", MORE_KINDS)
def test_more_kinds(tmp_path, kind, full_matrix):
    if not full_matrix and kind != MORE_KINDS[0]:
        pytest.skip("with --full-matrix")
    case = make_case(tmp_path, kind)
    for budget, caching, block_size in OPTIONS if full_matrix else [(16, True, 8)]:
        check(case, max_num_batched_tokens=budget, enable_prefix_caching=caching, block_size=block_size)


@pytest.mark.parametrize(("kind", "longest"), [("mistral", 30), ("qwen3", 90)])
def test_a_pool_so_small_that_sequences_are_preempted_many_times(cases, kind, longest):
    """longest: prompts of about a window at most, where there is one, because nothing grows beyond it."""
    whole = cases[kind]
    short = [i for i, prompt in enumerate(whole.prompts) if len(prompt) <= longest] * (720 // longest)
    case = Case(whole.folder, [whole.prompts[i] for i in short], [whole.expected[i] for i in short])
    stats = check(
        case,
        block_size=2,  # admission leaves one block a sequence for growth: the smaller, the sooner the pool is short
        num_gpu_blocks_override=120,
        max_num_batched_tokens=128,
        enable_prefix_caching=False,
    )
    assert stats.num_preemptions >= 10


def options_at(tp: int, kind: str, full: bool) -> list[tuple[int, bool, int]]:
    """All combinations, or one for each model, which together cover every value of every option.

    With four ranks it is one of those without small chunks: on two cores the many steps would take most of the time.
    """
    if full:
        return OPTIONS
    several = [options for options in OPTIONS if tp == 2 or options[0] == max(BUDGETS)]
    return [several[5 * KINDS.index(kind) % len(several)]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tp", [2, 4])
def test_over_ray(cases, kind, tp, ray_cluster, full_matrix):
    for budget, caching, block_size in options_at(tp, kind, full_matrix):
        check(
            cases[kind],
            tensor_parallel_size=tp,
            standby_ranks="none",
            max_num_batched_tokens=budget,
            enable_prefix_caching=caching,
            block_size=block_size,
        )
