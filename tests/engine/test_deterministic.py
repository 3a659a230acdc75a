"""The deterministic mode on the CPU: the same tokens and log-probabilities, to the bit, whatever else runs."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from support.model_factory import PagedRunner, load, make_model

from rayllm import LLM, SamplingParams

NUM_TOKENS = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)
DRAWN = SamplingParams(temperature=0.9, top_p=0.8, seed=5, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)


def prompts(count: int, seed: int, longest: int = 60) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(250) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def generate(llm: LLM, batch: list[list[int]], params: SamplingParams) -> list[object]:
    """Token ids and log-probabilities of each prompt, to compare with ==."""
    outputs = [output.outputs[0] for output in llm.generate(batch, params, use_tqdm=False)]
    return [
        (out.token_ids, [{token: value.logprob for token, value in entry.items()} for entry in out.logprobs])
        for out in outputs
    ]


def engine(folder: str, **options: object) -> LLM:
    return LLM(folder, device="cpu", deterministic=True, skip_tokenizer_init=True, **options)


@pytest.mark.parametrize(("kind", "num_blocks"), [("qwen3", 20), ("mistral", 7), ("opt_post", 20)])
def test_results_do_not_depend_on_the_batch(tmp_path, kind, num_blocks):
    """Also in a pool so small that sequences are preempted; those with a sliding window hold few blocks each."""
    folder = make_model(tmp_path, kind)
    mine, others = prompts(3, seed=1), prompts(10, seed=2)
    with engine(folder) as llm:
        alone = [[generate(llm, [prompt], params)[0] for prompt in mine] for params in (GREEDY, DRAWN)]
        assert llm.stats().prefix_cache_hits > 0  # the second round began with cached blocks
        for params, expected in zip((GREEDY, DRAWN), alone, strict=True):
            assert generate(llm, others[:5] + mine + others[5:], params)[5:8] == expected
    with engine(
        folder,
        max_num_batched_tokens=30,
        max_num_seqs=12,
        num_gpu_blocks_override=num_blocks,
        block_size=8,
        max_model_len=100,
    ) as llm:
        for params, expected in zip((GREEDY, DRAWN), alone, strict=True):
            assert generate(llm, mine + others, params)[:3] == expected
        assert llm.stats().num_preemptions > 0
        llm.engine.check_integrity()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "kind",
    [
        *("llama", "qwen2", "qwen3_tied", "mistral", "opt", "bloom", "gemma2", "gemma3", "phi4", "glm4", "ministral3"),
        *("gemma4_moe", "gemma4_shared"),
        *("qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v3", "qwen3_5", "qwen3_next"),
    ],
)
def test_logits_do_not_depend_on_chunks(tmp_path, kind, dtype):
    folder = make_model(tmp_path, kind)
    model = load(folder, dtype=str(dtype).removeprefix("torch."), deterministic=True)
    text, other = list(range(3, 180, 3)), prompts(1, seed=5)[0]
    whole = PagedRunner(model, dtype=dtype).step([("a", text)])[0]
    runner = PagedRunner(model, dtype=dtype)
    first = runner.step([("b", other), ("a", text[:7])])[1]
    second = runner.step([("a", text[7:-1])])[0]
    third = runner.step([("a", text[-1:]), ("b", other[:1])])[0]
    decoded = torch.cat([first, second, third])
    assert torch.isfinite(whole).all()
    assert torch.equal(decoded, whole)


def test_captured_steps_with_decodes_of_their_own_are_refused(tmp_path):
    runner = PagedRunner(load(make_model(tmp_path, "llama"), deterministic=True))
    batch = runner.batch([("a", [1])], num_decodes=1, padding=0)
    with torch.inference_mode():
        runner.model(batch, runner.caches)
        with pytest.raises(ValueError, match="decodes as chunks"):
            runner.model(replace(batch, prefill_row=0), runner.caches)
