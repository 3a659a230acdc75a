"""What adapters cost the time between two tokens: none loaded, one, and several in one batch.

    python benchmarks/lora.py --model configs/models/llama-3.1-8b [--quantization fp8] [--batch 1 32] [--rank 16]

The model has dummy weights, the adapters random ones, for all projections of the layers. An engine without
`enable_lora` is measured, then one with it. A figure is (time of --tokens + 1 tokens - time of one) / --tokens, so
prompts do not count, and the median of --repeat such pairs. Loading adapters must capture no graph: captures of the
second engine are counted when it has started and at the end.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rayllm import LLM, SamplingParams

PROMPT = 128  # tokens of each sequence before those that are measured


def make_adapter(folder: Path, model: str, rank: int, seed: int) -> str:
    """A random adapter of every projection of a Llama or Qwen3 shape; returns its folder."""
    config = json.loads(Path(model, "config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    queries, keys, inner = heads * head, config["num_key_value_heads"] * head, config["intermediate_size"]
    shapes = {
        "self_attn.q_proj": (hidden, queries),
        "self_attn.k_proj": (hidden, keys),
        "self_attn.v_proj": (hidden, keys),
        "self_attn.o_proj": (queries, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for layer in range(config["num_hidden_layers"]):
        for name, (inputs, outputs) in shapes.items():
            key = f"base_model.model.model.layers.{layer}.{name}"
            a = torch.randn(rank, inputs, generator=generator) * inputs**-0.5
            b = torch.randn(outputs, rank, generator=generator) * 1e-3
            tensors[f"{key}.lora_A.weight"], tensors[f"{key}.lora_B.weight"] = a.bfloat16(), b.bfloat16()
    folder.mkdir()
    told = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(told))
    save_file(tensors, folder / "adapter_model.safetensors")
    return str(folder)


def token_ms(llm: LLM, batch: int, adapters: list[str | None], tokens: int, repeat: int) -> float:
    """Milliseconds between two tokens of so many sequences, which have the adapters in turn."""
    rng, names = random.Random(0), [adapters[i % len(adapters)] for i in range(batch)]
    figures = []
    for _ in range(repeat + 1):  # the first pair warms up
        prompts = [[rng.randrange(4, 4000) for _ in range(PROMPT)] for _ in range(batch)]
        times = []
        for count in (1, tokens + 1):
            params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
            started = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False, adapter=names)
            times.append(time.perf_counter() - started)
        figures.append((times[1] - times[0]) / tokens * 1e3)
    return statistics.median(figures[1:])


def count_captures() -> list[int]:
    """A list whose one element counts the CUDA graphs that are captured from now on."""
    count, begin = [0], torch.cuda.CUDAGraph.capture_begin

    def counted(self: Any, *args: Any, **kwargs: Any) -> None:
        count[0] += 1
        begin(self, *args, **kwargs)

    torch.cuda.CUDAGraph.capture_begin = counted  # type: ignore[method-assign]
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="configs/models/llama-3.1-8b")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    options: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "enable_prefix_caching": False}
    options |= {"max_model_len": 2048, "max_num_seqs": max(args.batch), "quantization": args.quantization}
    names = [f"adapter-{number}" for number in range(args.adapters)]
    figures: dict[int, list[float | None]] = {batch: [] for batch in args.batch}
    with LLM(args.model, **options) as llm:
        for batch in args.batch:
            figures[batch].append(token_ms(llm, batch, [None], args.tokens, args.repeat))
    captures = count_captures()
    with (
        tempfile.TemporaryDirectory() as folder,
        LLM(args.model, **options, enable_lora=True, max_lora_rank=args.rank, max_loras=args.adapters) as llm,
    ):
        at_start = captures[0]
        for batch in args.batch:
            figures[batch].append(token_ms(llm, batch, [None], args.tokens, args.repeat))
        for number, name in enumerate(names):
            llm.load_lora_adapter(name, make_adapter(Path(folder, name), args.model, args.rank, number))
        for used in (names[:1], names, [names[0], None]):
            for batch in args.batch:
                fits = len(used) <= batch
                figures[batch].append(token_ms(llm, batch, list(used), args.tokens, args.repeat) if fits else None)
        print(f"captures: {at_start} at start, {captures[0] - at_start} since, {args.adapters} adapters loaded")
    print(f"ms between tokens, {args.model} quantization {args.quantization}, rank {args.rank}, prompts of {PROMPT}:")
    print(f"| batch | no adapters | enabled, none loaded | one | {args.adapters} mixed | one, for half |")
    print("|---|---|---|---|---|---|")
    for batch, (base, *others) in figures.items():
        assert base is not None
        cells = [f"{ms:.3f} ({ms / base - 1:+.1%})" if ms is not None else "" for ms in others]
        print(f"| {batch} | {base:.3f} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
