"""Measures the published table: every workload on every model shape, medians of three runs, as Markdown.

    python benchmarks/table.py                                   # one GPU
    python benchmarks/table.py --tp 4 --model llama-3.1-8b --model qwen3-32b
    python benchmarks/table.py --model llama-3.1-8b --quantization fp8

Each model runs in a process of its own, in a warm engine with random weights, through offline.py. Beside it stand the
figures of another engine in peers.yaml, where it has some of the same model, hardware and options; compare.py adds
such figures.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from peers import FILE, Figure, Record, find_figures, hardware, read_records

OFFLINE = Path(__file__).with_name("offline.py")
MODELS = Path(__file__).parents[1] / "configs" / "models"
ONE_GPU = ["qwen3-0.6b", "llama-3.1-8b", "qwen3-8b", "qwen2.5-1.5b", "llama-3.2-1b"]
WORKLOADS = ["nano256", "bs1_128_256", "bs32_1k_256", "bs256_1k_128", "prefill_16x8k", "prefill_1x512"]


def measure(model: str, tp: int, repeat: int, extra: list[str]) -> dict:
    """What `offline.py --json` reports. Raises CalledProcessError if it fails."""
    command = [sys.executable, str(OFFLINE), "--model", str(MODELS / model), "--json"]
    command += ["--load-format", "dummy", "--max-model-len", "16384", "--tp", str(tp), "--repeat", str(repeat), *extra]
    for workload in WORKLOADS:
        command += ["--workload", workload]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def rows(model: str, tp: int, report: dict, peer: dict[str, tuple[Figure, Record]]) -> list[str]:
    """Lines of a Markdown table. peer: the other engine's figures by workload."""
    lines = []
    for result in report["results"]:
        figure = Figure(result["figure"], result["unit"])
        other = peer[result["workload"]][0] if result["workload"] in peer else None
        cells = [
            f"{model}, tp={tp}",
            result["workload"],
            f"{figure.value:,.1f} {figure.unit}",
            f"{min(result['seconds']):.3f} to {max(result['seconds']):.3f} s",
            f"{result['cached_tokens']:,}",
            "" if other is None else f"{other.value:,g}",
            "" if other is None else f"{figure.ratio(other):.2f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def sources(peer: dict[str, tuple[Figure, Record]]) -> list[str]:
    """A line for each record that figures came from."""
    records = [record for _, record in peer.values()]
    return list(
        dict.fromkeys(f"{each.engine} {each.version}, {each.model}, {each.date}: {each.how}" for each in records)
    )


def engine_options(flags: list[str]) -> dict[str, Any]:
    """{"quantization": "fp8", "enforce_eager": True} of ["--quantization", "fp8", "--enforce-eager"]."""
    options: dict[str, Any] = {}
    name = ""
    for flag in flags:
        if flag.startswith("--"):
            name = flag.removeprefix("--").replace("-", "_")
            options[name] = True
        else:
            options[name] = yaml.safe_load(flag)
    return options


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", help=f"folder in configs/models; {', '.join(ONE_GPU)} if absent")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--peer", default="vllm", help="engine to stand beside")
    parser.add_argument("--peers", type=Path, default=FILE, help="file of its figures")
    options, extra = parser.parse_known_args()  # the rest goes to offline.py
    records, here = read_records(options.peers), hardware()
    settings = {"tensor_parallel_size": options.tp, **engine_options(extra)}
    print(f"| model shape | case | median | runs | cached tokens | {options.peer} | ratio |")
    print("|---|---|---|---|---|---|---|")
    used: dict[str, tuple[Figure, Record]] = {}
    for model in options.model or ONE_GPU:
        peer = find_figures(records, options.peer, model, here, settings)
        peer = {name: found for name, found in peer.items() if name in WORKLOADS}
        print("\n".join(rows(model, options.tp, measure(model, options.tp, options.repeat, extra), peer)), flush=True)
        used |= {f"{model} {name}": found for name, found in peer.items()}
    print("\n" + "\n".join(f"- {line}" for line in sources(used) or [f"no figures of {options.peer} on {here}"]))


if __name__ == "__main__":
    main()
