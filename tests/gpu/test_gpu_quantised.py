"""Weights in fewer bits on CUDA: the engine's log-probabilities against transformers', on one GPU, and over Ray on two.

The yardstick is transformers in float32 with the weights that the stored numbers mean, and tokens as they are. The
engine's error against it must not exceed by more than half that of transformers in bf16 whose tokens are rounded as
the format says, so the tolerance follows model and format.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import support.quantised as quantised
import torch
from models.test_quantised import AWQ, CASES, GPTQ, LINEARS, in_mxfp4
from support.kinds.common import EOS
from support.model_factory import make_model
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from rayllm import LLM, SamplingParams
from rayllm.api.types import EngineStats

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

NUM_TOKENS = 48
ROOM = {"num_gpu_blocks_override": 1000}
SMALL_POOL = {"max_num_batched_tokens": 64, "num_gpu_blocks_override": 60, "block_size": 8, "swap_space": 0.1}
MOST_E4M3 = 448.0

Rounding = Callable[[Tensor], Tensor]


def rounded(x: Tensor, *, width: int | None = None, scale: float | None = None) -> Tensor:
    """x [..., K] to e4m3 and back: by a scale for `width` inputs, for all, or by `scale`, beyond which it saturates."""
    parts = x.float().unflatten(-1, (-1, min(width or x.shape[-1], x.shape[-1])))
    scales = parts.abs().amax(-1, keepdim=True).clamp(min=1e-12) / MOST_E4M3 if scale is None else scale
    codes = (parts / scales).clamp(-MOST_E4M3, MOST_E4M3).to(torch.float8_e4m3fn)
    return (codes.float() * scales).flatten(-2).to(x.dtype)


# name -> (quantization_config, writer, how tokens are rounded)
FORMATS: dict[str, tuple[dict[str, Any], Callable[..., Any], Rounding | None]] = {
    "fp8-128": (*CASES["fp8-128"][:2], functools.partial(rounded, width=128)),
    "ct-fp8-token": (*CASES["ct-fp8-token"][:2], rounded),
    "fp8-tensor": (*CASES["fp8-tensor"][:2], functools.partial(rounded, scale=0.5)),
    **{name: (*CASES[name][:2], None) for name in ("ct-fp8-row", "gptq", "gptq-ordered", "ct-int4-zeros")},
    "gptq-128": (
        GPTQ | {"group_size": 128},
        functools.partial(quantised.gptq, group=128, bits=4, symmetric=True),
        None,
    ),
    "awq-128": (AWQ | {"group_size": 128}, functools.partial(quantised.awq, group=128), None),
}
SIZES = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 64}
KINDS = {
    "qwen3": SIZES,
    "qwen2": SIZES | {"intermediate_size": 768},
    "qwen3_moe": SIZES | {"moe_intermediate_size": 256},
    "gpt_oss": SIZES | {"intermediate_size": 256},
}
MIXED = ("fp8-128", "ct-fp8-token", "ct-fp8-row", "gptq-128", "awq-128")  # that experts keep
CASE_NAMES = [*((kind, name) for kind in ("qwen3", "qwen2") for name in FORMATS)]
CASE_NAMES += [*(("qwen3_moe", name) for name in MIXED), ("gpt_oss", "mxfp4")]
each_case = pytest.mark.parametrize(("kind", "name"), CASE_NAMES)
CaseOf = Callable[[str, str], "Case"]


class RoundedTokens(TorchFunctionMode):
    """Rounds what products get whose weights are in fewer bits."""

    def __init__(self, weights: list[Tensor], rounding: Rounding):
        super().__init__()
        self.places = {weight.untyped_storage().data_ptr() for weight in weights}
        self.rounding = rounding
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear and args[1].untyped_storage().data_ptr() in self.places:
            args = (self.rounding(args[0]), *args[1:])
            self.count += 1
        return func(*args, **(kwargs or {}))


@dataclass
class Case:
    folder: str
    plain: str  # what its numbers mean, in float32
    prompts: list[list[int]]
    rounding: Rounding | None


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> CaseOf:
    """The case of a kind in a format, made once."""
    return functools.cache(lambda kind, name: make_case(tmp_path_factory.mktemp(kind) / kind, kind, name))


def make_case(folder: Path, kind: str, name: str) -> Case:
    make_model(folder, kind, **KINDS[kind])
    if name == "mxfp4":
        plain, rounding = in_mxfp4(folder), None
    else:
        config, write, rounding = FORMATS[name]
        plain = quantised.quantise(folder, config, write, LINEARS)
    rng = random.Random(kind)
    prompts = [[rng.randrange(EOS - 1) for _ in range(rng.randint(1, 200))] for _ in range(16)]
    return Case(str(folder), str(plain), prompts, rounding)


def generate(case: Case, **options: object) -> tuple[list[list[int]], Tensor, EngineStats]:
    """Token ids of each prompt, greedy, and their log-probabilities [prompts, NUM_TOKENS]."""
    options = {"device": "cuda", "dtype": "bfloat16", "skip_tokenizer_init": True, "max_num_seqs": 32, **options}
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
    with LLM(case.folder, **options) as llm:
        outputs = [output.outputs[0] for output in llm.generate(case.prompts, params, use_tqdm=False)]
        llm.engine.check_integrity()
        stats = llm.stats()
    logprobs = [
        [entry[token].logprob for entry, token in zip(out.logprobs, out.token_ids, strict=True)] for out in outputs
    ]
    return [out.token_ids for out in outputs], torch.tensor(logprobs), stats


@torch.inference_mode()
def reference(case: Case, generated: list[list[int]], dtype: torch.dtype, rounding: Rounding | None = None) -> Tensor:
    """transformers' log-probabilities of the generated tokens, [prompts, NUM_TOKENS]."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(case.plain)
    model = getattr(transformers, config.architectures[0]).from_pretrained(case.plain, dtype=dtype).cuda().eval()
    model.set_experts_implementation("eager")  # each expert by two calls of `linear`
    weights = [
        parameter
        for name, parameter in model.named_parameters()
        if name.endswith((*LINEARS, "experts.gate_up_proj", "experts.down_proj"))
    ]
    mode = RoundedTokens(weights if rounding else [], rounding or rounded)
    rows = []
    with mode:
        for prompt, tokens in zip(case.prompts, generated, strict=True):
            logits = model(torch.tensor([prompt + tokens], device="cuda")).logits[0].float()
            logprobs = logits[len(prompt) - 1 : -1].log_softmax(-1)
            rows.append(logprobs.gather(1, torch.tensor(tokens, device="cuda")[:, None])[:, 0].cpu())
    # Attention's four products and at least two of an MLP, in each layer and for each prompt.
    assert not rounding or mode.count >= 6 * config.num_hidden_layers * len(case.prompts)
    return torch.stack(rows)


def check(case: Case, **options: object) -> EngineStats:
    tokens, ours, stats = generate(case, **options)
    exact = reference(case, tokens, torch.float32)
    own_error = float((reference(case, tokens, torch.bfloat16, case.rounding) - exact).abs().mean())
    error = float((ours - exact).abs().mean())
    print(f"{options}: mean |dlogprob| {error:.4f}, transformers bf16 with rounded tokens {own_error:.4f}")
    assert error < 1.5 * own_error + 1e-3
    return stats


@each_case
@pytest.mark.parametrize("enforce_eager", [True, False])
def test_one_gpu(case_of: CaseOf, kind: str, name: str, enforce_eager: bool) -> None:
    check(case_of(kind, name), enforce_eager=enforce_eager, **ROOM)


@each_case
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_small_chunks_and_preemption(case_of: CaseOf, kind: str, name: str, mode: str) -> None:
    stats = check(case_of(kind, name), preemption_mode=mode, **SMALL_POOL)
    assert stats.num_preemptions > 0
    assert (stats.num_swap_preemptions > 0) == (mode == "swap")


@each_case
def test_two_ranks_over_ray(case_of: CaseOf, kind: str, name: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    check(case_of(kind, name), tensor_parallel_size=2, **ROOM)
