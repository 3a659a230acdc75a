"""Seconds from the start of a process to its first token, and where they go, with an empty kernel cache and a full one.

    python benchmarks/startup.py [--model configs/models/qwen3-0.6b] [--warm-runs 2] [LLM options as NAME=VALUE]

Each run is a process of its own, timed from its creation by the kernel's clock: interpreter and imports, the phases of
the engine's start, and one prompt of 128 tokens to its first token. The first run finds a new kernel cache, which
the others share. Weights are random.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

PROMPT_TOKENS = 128


def seconds_alive() -> float:
    """Since this process was created."""
    started_ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")


def start(options: dict[str, object]) -> list[tuple[str, float]]:
    """(part, seconds) of one start in this process."""
    import rayllm.worker.worker  # noqa: F401 # torch and Triton, which the constructor would import
    from rayllm import LLM, SamplingParams

    parts = [("interpreter and imports", seconds_alive())]
    began = time.perf_counter()
    with LLM(load_format="dummy", skip_tokenizer_init=True, **options) as llm:  # type: ignore[arg-type]
        phases = llm.engine.info.start.phases
        loaded = time.perf_counter() - began
        parts += phases
        parts.append(("everything else of the constructor", loaded - sum(seconds for _name, seconds in phases)))
        began = time.perf_counter()
        prompt = [i % 1000 for i in range(PROMPT_TOKENS)]
        llm.generate([prompt], SamplingParams(max_tokens=1, ignore_eos=True), use_tqdm=False)
        parts.append(("first token", time.perf_counter() - began))
        parts.append(("all", seconds_alive()))
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="configs/models/qwen3-0.6b")
    parser.add_argument("--warm-runs", type=int, default=2)
    parser.add_argument("--cache", help="empty folder to keep the kernel cache in; a temporary one if absent")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("options", nargs="*")
    args = parser.parse_args()
    if args.child:
        options = {name: yaml.safe_load(value) for name, _, value in (text.partition("=") for text in args.options)}
        print(json.dumps(start({"model": args.model, **options})))
        return
    runs = []
    if args.cache is not None and any(Path(args.cache).iterdir()):
        parser.error(f"--cache {args.cache} is not empty")
    with tempfile.TemporaryDirectory() as temporary:
        environment = {**os.environ, "TRITON_CACHE_DIR": args.cache or temporary}
        for _ in range(1 + args.warm_runs):
            command = [sys.executable, __file__, "--child", "--model", args.model, *args.options]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
            runs.append(json.loads(done.stdout.strip().splitlines()[-1]))
    names = ["empty kernel cache", *["full kernel cache"] * args.warm_runs]
    print("| seconds | " + " | ".join(names) + " |\n|---" + "|---" * len(names) + "|")
    for i, (part, _seconds) in enumerate(runs[0]):
        print(f"| {part} | " + " | ".join(f"{run[i][1]:.2f}" for run in runs) + " |")


if __name__ == "__main__":
    main()
