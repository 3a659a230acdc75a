"""bf16 embeddings on CUDA against transformers', alone and beside generation, with captured graphs and without.

The yardstick is transformers in float32: our vectors may be at most half as far again from its as those of its own
bf16 run.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from support.kinds.common import EOS
from support.model_factory import make_model

from rayllm import LLM, SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

KINDS = ("mistral", "qwen2", "qwen3", "opt")
POOLINGS = ("last", "mean")
GREEDY = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory: pytest.TempPathFactory) -> str:
    size = {"hidden_size": 512}
    if request.param != "opt":
        size |= {"intermediate_size": 1024, "head_dim": 64}
    return make_model(tmp_path_factory.mktemp(request.param), request.param, dtype="bfloat16", **size)


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(EOS - 1) for _ in range(rng.randint(1, 300))] for _ in range(24)]


def reference(folder: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Pooling -> [prompts, hidden_size] of transformers, of length 1."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).cuda().eval()
    seen: list[torch.Tensor] = []
    model.lm_head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0].float().cpu()))
    with torch.inference_mode():
        for prompt in prompts():
            model(torch.tensor([prompt], device="cuda"))
    pooled = {"last": torch.stack([each[-1] for each in seen]), "mean": torch.stack([each.mean(0) for each in seen])}
    return {kind: torch.nn.functional.normalize(vectors, dim=1) for kind, vectors in pooled.items()}


def check(folder: str, **options: object) -> None:
    exact, rough = reference(folder, torch.float32), reference(folder, torch.bfloat16)
    options = {"gpu_memory_utilization": 0.3, "max_num_seqs": 32, **options}
    with LLM(folder, device="cuda", dtype="bfloat16", skip_tokenizer_init=True, **options) as llm:
        requests = []
        for prompt in prompts():
            made = [llm._make(prompt, SamplingParams()) for _ in POOLINGS]
            requests += [(replace(each, pooling=kind), None) for each, kind in zip(made, POOLINGS, strict=True)]
            requests += [(llm._make(prompt, GREEDY), None)]
        outputs = llm._run(requests, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == GREEDY.max_tokens for output in outputs[2::3])
        again = {kind: llm.embed(prompts(), kind, use_tqdm=False) for kind in POOLINGS}
        llm.engine.check_integrity()
        assert llm.stats().num_used_blocks == 0
    for place, kind in enumerate(POOLINGS):
        own_error = (rough[kind] - exact[kind]).norm(dim=1).mean().item()
        for found in (outputs[place::3], again[kind]):
            vectors = torch.tensor([list(output.embedding) for output in found])
            assert (vectors.norm(dim=1) - 1).abs().max() < 1e-5
            error = (vectors - exact[kind]).norm(dim=1).mean().item()
            print(f"{Path(folder).name} {kind} {options}: mean distance {error:.4f}, transformers bf16 {own_error:.4f}")
            assert error < 1.5 * own_error + 1e-3


@pytest.mark.parametrize("enforce_eager", [True, False])
def test_one_gpu(folder, enforce_eager):
    check(folder, enforce_eager=enforce_eager)


def test_small_chunks(folder):
    check(folder, max_num_batched_tokens=64)


@TWO_GPUS
def test_two_ranks(folder):
    check(folder, tensor_parallel_size=2)
