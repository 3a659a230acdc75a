"""What a KV cache in fp8 costs in quality: perplexity and greedy agreement against a cache in the model's dtype.

    python benchmarks/kv_quality.py [model] [kernel] [--model FOLDER] [--texts 24] [--tokens 2000] [--device cpu]

model: the bundled model (or --model) over texts of Python's documentation (`pydoc_data`), as far as its context goes.

    text      as written; a context is one stretch of --tokens tokens
    recall    synthetic long contexts: paragraphs of 150 tokens, all repeated in another order. Figures are of the
              repeated half, whose tokens are best found in the cache

  perplexity; agreement: share of positions whose most likely token is that of the unquantised cache, given the same
  tokens before; greedy: share of tokens up to the first difference, of 64 generated after a quarter of each context.

kernel: attention of one query over 1k to 32k random keys of 128 dimensions in fp32, with a needle, a key like the
query. Keys have a few dimensions 16 times as large as the others, as those of many models. Scales are set as an engine
does.

  error: relative L2 error of outputs; needle: the weight of the needle, unquantised and quantised, and share of queries
  whose output is nearest to the needle's value.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from rayllm import LLM, SamplingParams
from rayllm.config.options import BUNDLED_MODEL
from rayllm.worker.kv_scales import scale_for
from rayllm_kernels.cache.kv_cache import quantise

FORMATS = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
GREEDY_TOKENS = 64
PARAGRAPH = 150
HEAD_DIM, QUERIES = 128, 256


@dataclass(frozen=True)
class Contexts:
    """Token ids of each context, and from which position on they count."""

    name: str
    ids: list[list[int]]
    first: int


def documentation() -> list[str]:
    """The topics of Python's documentation, in an order without meaning."""
    from pydoc_data.topics import topics

    names = sorted(topics)
    random.Random(0).shuffle(names)
    return [topics[name] for name in names]


def contexts(llm: LLM, count: int, tokens: int) -> list[Contexts]:
    assert llm.tokenizer is not None
    stream = [token for text in documentation() for token in llm.tokenizer.encode(text)]
    count = min(count, len(stream) // tokens)
    texts = [stream[i * tokens : (i + 1) * tokens] for i in range(count)]
    rng = random.Random(1)
    recall = []
    for text in texts:
        parts = [text[i : i + PARAGRAPH] for i in range(0, tokens // 2 - PARAGRAPH + 1, PARAGRAPH)]
        again = parts.copy()
        rng.shuffle(again)
        recall.append([token for part in parts + again for token in part])
    return [Contexts("text", texts, 1), Contexts("recall", recall, len(recall[0]) // 2)]


def read(llm: LLM, context: Contexts) -> tuple[float, list[int]]:
    """Perplexity, and the most likely token at each position that counts, over all contexts."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    total, best = 0.0, []
    for ids, output in zip(context.ids, llm.generate(context.ids, params, use_tqdm=False), strict=True):
        assert output.prompt_logprobs is not None
        for token, entry in zip(ids[context.first :], output.prompt_logprobs[context.first :], strict=True):
            assert entry is not None
            total -= entry[token].logprob
            best.append(min(entry, key=lambda other: entry[other].rank or 0))
    return math.exp(total / len(best)), best


def write(llm: LLM, context: Contexts) -> list[list[int]]:
    """Greedy tokens after a quarter of each context, or half of it where only that half counts."""
    params = SamplingParams(max_tokens=GREEDY_TOKENS, temperature=0.0, ignore_eos=True)
    prompts = [ids[: max(context.first, len(ids) // 4)] for ids in context.ids]
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def same_until(ours: list[int], theirs: list[int]) -> int:
    """Tokens up to the first difference."""
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(ours))


def compare_models(options: argparse.Namespace) -> None:
    results: dict[str, dict[str, tuple[float, list[int], list[list[int]]]]] = {}
    for kind in ("auto", *FORMATS):
        with LLM(
            options.model,
            device=options.device,
            dtype=options.dtype,
            kv_cache_dtype=kind,
            max_num_seqs=8,
            enable_prefix_caching=False,
        ) as llm:
            tokens = min(options.tokens, llm.engine.info.max_model_len - 1)
            made = contexts(llm, options.texts, tokens)
            results[kind] = {each.name: (*read(llm, each), write(llm, each)) for each in made}
    count = len(made[0].ids)
    print(f"{Path(options.model).name}, {count} contexts of {tokens} tokens, model in {llm.config.dtype}")
    print(f"{'contexts':10s} {'cache':10s} {'perplexity':>11s} {'change':>8s} {'agreement':>10s} {'greedy':>8s}")
    for name, (base, base_best, base_text) in results["auto"].items():
        for kind, figures in results.items():
            perplexity, best, text = figures[name]
            agreement = sum(a == b for a, b in zip(best, base_best, strict=True)) / len(best)
            same = sum(same_until(a, b) for a, b in zip(text, base_text, strict=True))
            greedy = same / sum(len(tokens) for tokens in base_text)
            print(
                f"{name:10s} {kind:10s} {perplexity:11.4f} {perplexity / base - 1:+8.2%} {agreement:10.2%} "
                f"{greedy:8.1%}",
                flush=True,
            )


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(outputs [N, D], weights [N, L]) of queries [N, D] over keys [N, L, D]."""
    weights = torch.softmax(torch.einsum("nd,nld->nl", q, k) * HEAD_DIM**-0.5, -1)
    return torch.einsum("nl,nld->nd", weights, v), weights


def stored(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What an fp8 cache gives back; an e4m3 scale follows the largest number, an e5m2 scale is 1."""
    scale = scale_for(x.abs().amax()[None], dtype) if dtype == torch.float8_e4m3fn else torch.ones(1)
    return quantise(x[..., None, :], scale, dtype)[..., 0, :].float() * scale


def compare_kernels(_options: argparse.Namespace) -> None:
    generator = torch.Generator().manual_seed(0)
    print(f"{QUERIES} queries over random keys and values")
    print(f"{'keys':>7s} {'scores':>7s} {'cache':10s} {'error':>8s} {'needle':>16s} {'found':>7s}")
    size = torch.ones(HEAD_DIM)
    size[:4] = 16.0
    for length in (1024, 8192, 32768):
        for spread in (0.5, 1.0, 2.0):
            sums = {kind: [0.0] * 5 for kind in FORMATS}
            for _ in range(QUERIES // 8):
                q = torch.randn(8, HEAD_DIM, generator=generator) / size * spread
                k, v = torch.randn(2, 8, length, HEAD_DIM, generator=generator)
                k = k * size
                # A score of log(length) + 2 above the rest gives the needle most of the weight.
                k[:, length // 3] = q / q.square().sum(-1, keepdim=True) * HEAD_DIM**0.5 * (math.log(length) + 2)
                exact, weights = attend(q, k, v)
                for kind, dtype in FORMATS.items():
                    rough, rough_weights = attend(q, stored(k, dtype), stored(v, dtype))
                    nearest = torch.cdist(rough[:, None], v).argmin(-1)[:, 0]
                    figures = (
                        (rough - exact).square().sum(),
                        exact.square().sum(),
                        weights[:, length // 3].sum(),
                        rough_weights[:, length // 3].sum(),
                        (nearest == length // 3).sum(),
                    )
                    sums[kind] = [a + float(b) for a, b in zip(sums[kind], figures, strict=True)]
            for kind, (error, norm, weight, rough_weight, hits) in sums.items():
                print(
                    f"{length:7d} {spread:7.1f} {kind:10s} {math.sqrt(error / norm):8.4f} {weight / QUERIES:7.4f} "
                    f"-> {rough_weight / QUERIES:.4f} {hits / QUERIES:7.1%}",
                    flush=True,
                )


PARTS: dict[str, Callable[[argparse.Namespace], None]] = {"model": compare_models, "kernel": compare_kernels}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=[*PARTS], help="model, kernel")
    parser.add_argument("--model", default=BUNDLED_MODEL)
    parser.add_argument("--texts", type=int, default=24, help="contexts of each kind")
    parser.add_argument("--tokens", type=int, default=2000, help="of a context")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    for part in options.parts:
        if part not in PARTS:
            parser.error(f"no part is called {part!r}; there are {', '.join(PARTS)}")
        PARTS[part](options)


if __name__ == "__main__":
    main()
