"""The deterministic mode on CUDA: the same tokens and log-probabilities, to the bit, whatever runs beside a request."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from support.model_factory import make_model

from rayllm import LLM, SamplingParams
from rayllm.config.options import BUNDLED_MODEL
from rayllm.layers.layer import BuildContext, Heads
from rayllm.layers.projection_norms import ProjectionNorms

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

# Head sizes of 128 use the Hopper prefill kernel where there is one; those of 32 and sliding windows the portable one.
SIZES = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 128}
MODELS = ("bundled", "qwen3", "mistral", "opt")
GREEDY = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True, logprobs=3)
DRAWN = SamplingParams(temperature=0.8, top_p=0.9, seed=11, max_tokens=24, ignore_eos=True, logprobs=0)
POOL_BLOCKS = 160  # of 16 tokens: too few for 72 prompts of up to 300 tokens


def prompts(count: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(4, 250) for _ in range(rng.randint(1, 300))] for _ in range(count)]


def generate(llm: LLM, batch: list[list[int]], params: SamplingParams) -> list[object]:
    """Token ids and log-probabilities of each prompt, to compare with ==."""
    outputs = [output.outputs[0] for output in llm.generate(batch, params, use_tqdm=False)]
    return [
        (out.token_ids, [{token: value.logprob for token, value in entry.items()} for entry in out.logprobs])
        for out in outputs
    ]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_results_of_two_ranks_do_not_depend_on_the_batch():
    """With prompts and batches on both sides of what the ranks' own kernels sum at once."""
    engine = partial(LLM, BUNDLED_MODEL, device="cuda", deterministic=True, skip_tokenizer_init=True)
    mine, others = prompts(4, seed=1), prompts(64, seed=2)
    crowd = others[:30] + mine + others[30:]
    with engine(tensor_parallel_size=2, max_num_batched_tokens=8192) as llm:
        for params in (GREEDY, DRAWN):
            alone = [generate(llm, [prompt], params)[0] for prompt in mine]
            assert generate(llm, crowd, params)[30:34] == alone


@pytest.mark.parametrize("kind", MODELS)
def test_results_do_not_depend_on_the_batch(tmp_path, kind):
    if kind == "bundled":
        folder = BUNDLED_MODEL
    else:
        # A window narrower than prompts, but wide enough that sequences need many blocks.
        sizes = {"opt": {"hidden_size": 512}, "mistral": SIZES | {"sliding_window": 200}}
        folder = make_model(tmp_path, kind, dtype="bfloat16", **sizes.get(kind, SIZES))
    engine = partial(
        LLM,
        folder,
        device="cuda",
        dtype="bfloat16",
        deterministic=True,
        skip_tokenizer_init=True,
        max_num_seqs=72,
        max_model_len=400,
    )
    mine, others = prompts(8, seed=1), prompts(64, seed=2)
    crowd = others[:30] + mine + others[30:]
    with engine(enforce_eager=True, num_gpu_blocks_override=2000) as llm:
        alone = [[generate(llm, [prompt], params)[0] for prompt in mine] for params in (GREEDY, DRAWN)]
        assert llm.stats().prefix_cache_hits > 0  # the second round began with cached blocks
        check(llm, crowd, alone)
    for tokens in (8192, 256):
        with engine(max_num_batched_tokens=tokens, num_gpu_blocks_override=2000) as llm:
            check(llm, crowd, alone)
            assert [generate(llm, [prompt], GREEDY)[0] for prompt in mine] == alone[0]
    for eager in (True, False):
        with engine(max_num_batched_tokens=256, num_gpu_blocks_override=POOL_BLOCKS, enforce_eager=eager) as llm:
            check(llm, crowd, alone)
            assert llm.stats().num_preemptions > 0


class Half:
    """The first of two ranks, whose other one has zeros."""

    rank, size = 0, 2

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_norms_of_projections_over_two_ranks_do_not_depend_on_the_batch():
    """Query and key heads as MiniMax-M2 has them."""
    context = BuildContext(Half(), torch.device("cuda"), torch.bfloat16, 1024, deterministic=True)
    norms = ProjectionNorms(context, Heads(48, 8, 128), 1e-6)
    for weight in (norms.q_norm, norms.k_norm):
        torch.nn.init.ones_(weight)
    torch.manual_seed(0)
    qkv = torch.randn(300, 32 * 128, dtype=torch.bfloat16, device="cuda")
    whole = norms(qkv)
    for count in (1, 2, 4, 8, 60):
        assert torch.equal(torch.cat([norms(part) for part in qkv.split(count)]), whole)


def check(llm: LLM, crowd: list[list[int]], alone: list[list[object]]) -> None:
    """Entries 30 to 37 of the crowd's results must be those of the same prompts alone, greedy and drawn."""
    for params, expected in zip((GREEDY, DRAWN), alone, strict=True):
        for ours, theirs in zip(generate(llm, crowd, params)[30:38], expected, strict=True):
            assert ours == theirs
    llm.engine.check_integrity()
