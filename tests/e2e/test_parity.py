"""Greedy tokens of whole engines against transformers in float32 on the CPU, for every kind of checkpoint.

With `--full-matrix` each kind of `support.kinds`, and so each architecture, is run on 1, 2 and 4 ranks with every
combination of the options, in small pools with preemption in both ways, and on Ray's actors; `-k` picks a part of that,
as `-k "gpt_oss and pools"`. Without it each kind has two of these runs.

Ranks are threads of this process where Ray is not what is tested.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support.engine import outputs_of
from support.kinds.common import EOS
from support.model_factory import KINDS, make_model
from support.thread_executor import ThreadExecutor
from support.yardstick import transformers_model

from rayllm import LLM, SamplingParams
from rayllm.api.types import EngineStats, GenerationRequest
from rayllm.config.kv_groups import kv_groups
from rayllm.config.model_folder import load_model_spec
from rayllm.config.options import EngineConfig
from rayllm.config.resolved import ResolvedConfig, resolve
from rayllm.core.memory import KVWindow, most_blocks
from rayllm.engine.engine import EngineCore

BUDGETS, CACHING, BLOCK_SIZES = (16, 2048), (True, False), (1, 8, 16)
OPTIONS = [
    {"max_num_batched_tokens": budget, "enable_prefix_caching": caching, "block_size": size}
    for budget, caching, size in itertools.product(BUDGETS, CACHING, BLOCK_SIZES)
]
POOLS = [
    {"preemption_mode": mode, "enable_prefix_caching": caching}
    for mode, caching in itertools.product(("recompute", "swap"), CACHING)
]
EVERY_OPTION = "qwen3"  # has all combinations of OPTIONS in the quick half too
QUICK = {
    "test_options": [(kind, 1) for kind in KINDS],
    "test_small_pools": [("mistral", 1), ("deepseek_v3", 2)],
    "test_over_ray": [("mistral", 2), ("qwen3_next", 2)],
}
RANKS = {"test_options": (1, 2, 4), "test_small_pools": (1, 2, 4), "test_over_ray": (2, 4)}

LENGTHS = (1, 2, 3, 5, 8, 13, 16, 17, 20, 24, 25, 31, 47, 64, 90, 131, 180, 200)
BEGINNINGS = (17, 40, 64, 80, 119, 120)  # tokens that a prompt shares with longer ones, for the prefix cache
MOST = max(LENGTHS)
# The next best token is so far behind, over the spread of the logits, that no order of sums makes it the best one.
MARGIN = 5e-4
SPARE_BLOCKS = 10  # of a small pool, beside what the longest sequence needs


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    name = metafunc.function.__name__
    every = [(kind, tp) for kind in KINDS for tp in RANKS[name]]
    chosen = every if metafunc.config.getoption("--full-matrix") else QUICK[name]
    metafunc.parametrize(("kind", "tp"), chosen, ids=[f"{kind}-tp{tp}" for kind, tp in chosen])


@dataclass
class Case:
    folder: str
    prompts: list[list[int]]
    expected: list[list[int]]

    @property
    def num_tokens(self) -> int:
        return len(self.expected[0])


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory, full_matrix: bool) -> Callable[[str], Case]:
    torch.set_num_threads(1)
    num_tokens = 32 if full_matrix else 16
    return functools.cache(lambda kind: make_case(tmp_path_factory.mktemp(kind), kind, num_tokens))


def make_case(folder: Path, kind: str, num_tokens: int) -> Case:
    """At least 16 prompts of 1 to 200 tokens, and what transformers says to them.

    Shorter ones where frequencies depend on the length: up to one of which both are told the same.
    """
    make_model(folder, kind)
    rng, config = random.Random(kind), settle(str(folder))
    most = config.max_model_len - num_tokens - 1
    shared = [rng.randrange(EOS - 1) for _ in range(MOST)]
    prompts = [[rng.randrange(EOS - 1) for _ in range(min(length, most))] for length in LENGTHS]
    prompts += [[*shared[:length], length][-most:] for length in BEGINNINGS]
    found = generate(config, prompts, num_tokens)[0]
    model, case = transformers_model(folder), Case(str(folder), [], [])
    for prompt, [tokens] in zip(prompts, found, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
        if is_steady(logits, tokens):
            case.prompts.append(prompt)
            case.expected.append(tokens)
    assert len(case.prompts) >= 16, "too few prompts whose tokens do not depend on roundings"
    assert len({tuple(tokens) for tokens in case.expected}) > 12, "the reference says the same to every prompt"
    return case


def is_steady(logits: torch.Tensor, tokens: list[int]) -> bool:
    """Whether roundings cannot change which token is the best one. Those before the first where they can are checked.

    logits: of transformers [tokens, vocab], each after the tokens before.
    """
    best, second = (logits.topk(2).values / logits.std()).unbind(-1)
    for i, gap in enumerate((best - second).tolist()):
        if gap < MARGIN:
            return False
        assert tokens[i] == int(logits[i].argmax()), f"token {i} differs"
    return True


def settle(folder: str, tp: int = 1, **options: object) -> ResolvedConfig:
    settings = {"device": "cpu", "skip_tokenizer_init": True, "max_num_seqs": 64, **options}
    settings.setdefault("max_model_len", min(256, load_model_spec(folder).default_model_len))
    return resolve(EngineConfig(model=folder, tensor_parallel_size=tp, **settings), 0)


def params(num_tokens: int, n: int = 1) -> SamplingParams:
    """Greedy. n: completions, all of them alike, because only one token is left to draw."""
    if n == 1:
        return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    return SamplingParams(n=n, temperature=1.0, top_k=1, max_tokens=num_tokens, ignore_eos=True)


def generate(
    config: ResolvedConfig, prompts: list[list[int]], num_tokens: int, n: list[int] | None = None
) -> tuple[list[list[list[int]]], EngineStats]:
    """The tokens of all completions of each prompt, n[i] of them or one, by an engine of these options."""
    executor = ThreadExecutor(config)
    core = EngineCore(config, executor, executor.start())
    try:
        requests = [
            GenerationRequest(request_id=str(i), prompt_token_ids=prompt, params=params(num_tokens, n[i] if n else 1))
            for i, prompt in enumerate(prompts)
        ]
        outputs = outputs_of(core, requests)
        core.check_integrity()
        stats = core.stats()
    finally:
        core.shutdown()
    assert stats.num_used_blocks == stats.num_used_cpu_blocks == stats.num_swapped == 0
    return [[completion.token_ids for completion in output.outputs] for output in outputs], stats


def test_options(case_of, kind, tp, full_matrix):
    """Chunks of 16 tokens and prompts as wholes, prefix caching on and off, blocks of several sizes."""
    case = case_of(kind)
    every = full_matrix or kind == EVERY_OPTION
    for options in OPTIONS if every else [OPTIONS[5 * KINDS.index(kind) % len(OPTIONS)]]:
        found, stats = generate(settle(case.folder, tp, **options), case.prompts, case.num_tokens)
        assert found == [[tokens] for tokens in case.expected], options
        assert options["enable_prefix_caching"] or not stats.prefix_cache_hits


def test_small_pools(case_of, kind, tp, full_matrix):
    """So small that sequences are preempted, samples of one prompt among them, in chunks of 16 tokens.

    Short prompts grow also where all layers have windows, beyond which nothing does.
    """
    case = case_of(kind)
    short = [i for i, prompt in enumerate(case.prompts) if len(prompt) < 25]
    order = [*range(len(case.prompts)), *short * 4]
    prompts, counts = [case.prompts[i] for i in order], [1 if place % 4 else 3 for place in range(len(order))]
    for options in POOLS if full_matrix else POOLS[1:3]:
        options = {"block_size": 2, "max_num_batched_tokens": 16, "swap_space": 0.05, **options}
        plain = settle(case.folder, tp, **options)
        windows = [KVWindow(group.window, plain.block_size) for group in kv_groups(plain.spec, tp)]
        longest = max(len(prompt) for prompt in case.prompts) + case.num_tokens
        num_blocks = most_blocks(windows, longest) + SPARE_BLOCKS
        found, stats = generate(
            settle(case.folder, tp, num_gpu_blocks_override=num_blocks, max_model_len=None, **options),
            prompts,
            case.num_tokens,
            counts,
        )
        assert found == [[case.expected[i]] * count for i, count in zip(order, counts, strict=True)], options
        print(f"{kind} tp {tp} {options['preemption_mode']}: {stats.num_preemptions} preemptions")
        assert stats.num_preemptions > 0
        assert (stats.num_swap_preemptions > 0) == (options["preemption_mode"] == "swap")


def test_over_ray(case_of, ray_cluster, kind, tp):
    case = case_of(kind)
    options = OPTIONS[(5 * KINDS.index(kind) + tp) % len(OPTIONS)]
    shared = settle(case.folder, tp, standby_ranks="none", **options).options.model_dump(exclude_unset=True)
    with LLM(**shared) as llm:
        outputs = llm.generate(case.prompts, params(case.num_tokens), use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == case.expected
        llm.engine.check_integrity()
        assert llm.stats().num_used_blocks == 0
