"""Measures the published table: every workload on every model shape, medians of three runs, as Markdown.

    python benchmarks/table.py                                   # one GPU
    python benchmarks/table.py --tp 4 --model llama-3.1-8b --model qwen3-32b

Each model runs in a process of its own, in a warm engine with random weights, through offline.py. vLLM 0.24 stands
beside it where there are figures for the same kind of machine and setting.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

OFFLINE = Path(__file__).with_name("offline.py")
MODELS = Path(__file__).parents[1] / "configs" / "models"
ONE_GPU = ["qwen3-0.6b", "llama-3.1-8b", "qwen3-8b", "qwen2.5-1.5b", "llama-3.2-1b"]
WORKLOADS = ["nano256", "bs1_128_256", "bs32_1k_256", "bs256_1k_128", "prefill_16x8k", "prefill_1x512"]
# (model, tp) -> figures in the order of WORKLOADS; None where there is none
VLLM: dict[tuple[str, int], list[float | None]] = {
    ("qwen3-0.6b", 1): [23_018, 608, 10_573, 16_472, 271_000, 7],
    ("llama-3.1-8b", 1): [9_456, 201.5, 3_422, 3_862, 37_940, 17],
    ("llama-3.1-8b", 4): [21_094, 369, 7_301, 10_436, 108_200, None],
}


def measure(model: str, tp: int, repeat: int, extra: list[str]) -> dict:
    """What `offline.py --json` reports. Raises CalledProcessError if it fails."""
    command = [sys.executable, str(OFFLINE), "--model", str(MODELS / model), "--json"]
    command += ["--load-format", "dummy", "--max-model-len", "16384", "--tp", str(tp), "--repeat", str(repeat), *extra]
    for workload in WORKLOADS:
        command += ["--workload", workload]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def rows(model: str, tp: int, report: dict) -> list[str]:
    """Lines of a Markdown table."""
    lines = []
    others: list[float | None] = VLLM.get((model, tp)) or [None] * len(WORKLOADS)
    for result, other in zip(report["results"], others, strict=True):
        figure, unit = result["figure"], result["unit"].removesuffix(" tok/s").replace("out", "").replace("in", "in/s")
        ratio = "" if other is None else f"{other / figure if unit == 'ms' else figure / other:.2f}"
        spread = f"{min(result['seconds']):.3f} to {max(result['seconds']):.3f} s"
        cells = [
            f"{model}, tp={tp}",
            result["workload"],
            f"{figure:,.1f} {unit}".strip(),
            spread,
            f"{result['cached_tokens']:,}",
            "" if other is None else f"{other:,}",
            ratio,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", help=f"folder in configs/models; {', '.join(ONE_GPU)} if absent")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=3)
    options, extra = parser.parse_known_args()  # the rest goes to offline.py
    print("| model shape | case | median | runs | cached tokens | vLLM 0.24 | ratio |\n|---|---|---|---|---|---|---|")
    for model in options.model or ONE_GPU:
        print("\n".join(rows(model, options.tp, measure(model, options.tp, options.repeat, extra))), flush=True)


if __name__ == "__main__":
    main()
