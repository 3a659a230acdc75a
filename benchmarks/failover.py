"""How long streams stand still over HTTP when an engine dies or stops, with another replica that goes on.

    python benchmarks/failover.py [--model rayllm/assets/tiny-pydoc] [--streams 64] [--signal KILL STOP] [--kind engine]
                                  [--set device=cpu --set num_replicas=2] [--share-gpu]

`rayllm launch` with the options of --set, two replicas by default. All streams run once undisturbed, and once for each
signal, which one process of the kind gets when half of that time has passed; then the script waits until the server has
as many replicas as before. A gap is the time between two chunks with tokens of one stream, as its client sees it.

--share-gpu: a Ray is started that believes in a GPU for each replica, and all of them use the same one. Their KV caches
need a size then (num_gpu_blocks_override), since each counts the memory that the other one takes.

Exit code 1 if a stream failed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import yaml
from http_load import Sample, completion_bodies, first_model, run_load
from launched_server import PROCESSES, free_port, launched, num_replicas, own_session, processes_of, with_tokenizer

WHOLE_LIMIT_S = 120.0  # for a server to be whole again


def describe(name: str, samples: list[Sample]) -> str:
    gaps = sorted(sample.longest_gap for sample in samples)
    p99 = gaps[int(0.99 * (len(gaps) - 1))]
    failed = [sample.failure for sample in samples if sample.failure is not None]
    said = f": {failed[0]}" if failed else ""
    return (
        f"{name:12} longest gap of a stream: p50 {statistics.median(gaps):.3f} p99 {p99:.3f} max {gaps[-1]:.3f} s; "
        f"{len(failed)} of {len(samples)} failed{said}"
    )


def wait_until_whole(url: str, victim: int, replicas: int) -> float:
    """Seconds until a process is gone and there are so many replicas. Raises TimeoutError."""
    began = time.monotonic()
    while time.monotonic() < began + WHOLE_LIMIT_S:
        if not Path(f"/proc/{victim}").exists() and num_replicas(url) == replicas:
            return time.monotonic() - began
        time.sleep(0.2)
    raise TimeoutError(f"the server has not {replicas} replicas after {WHOLE_LIMIT_S:g} s")


def measure(url: str, session: int, replicas: int, args: argparse.Namespace) -> bool:
    """Whether all streams ended as they should. session: of the processes that are struck."""
    model, good = first_model(url), True

    def run(number: int) -> list[Sample]:
        bodies = completion_bodies(model, args.streams, args.prompt_tokens, args.output_tokens, run=number)
        return run_load(url, bodies, concurrency=args.streams)

    wait_until_whole(url, 0, replicas)
    run(0)  # warms up
    began = time.monotonic()
    print(describe("undisturbed", run(1)), flush=True)
    took = time.monotonic() - began
    for number, name in enumerate(args.signal, 2):
        victim = processes_of(session, args.kind)[0]
        timer = threading.Timer(took / 2, os.kill, (victim, signal.Signals[f"SIG{name}"]))
        timer.start()
        samples = run(number)
        timer.join()
        print(describe(name, samples), flush=True)
        good = good and not any(sample.failure for sample in samples)
        print(f"{'':12} whole again {wait_until_whole(url, victim, replicas):.1f} s after the last stream", flush=True)
    return good


@contextlib.contextmanager
def shared_gpu(replicas: int) -> Iterator[int]:
    """A Ray that believes in a GPU for each replica; its session."""
    port = free_port()
    os.environ |= {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1", "RAY_ADDRESS": f"127.0.0.1:{port}"}
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--port", str(port)]
    with own_session([*command, "--num-gpus", str(replicas), "--include-dashboard", "false"]) as process:
        time.sleep(10)
        yield process.pid


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="rayllm/assets/tiny-pydoc")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=512)
    parser.add_argument("--signal", nargs="+", choices=["KILL", "STOP"], default=["KILL", "STOP"])
    parser.add_argument("--kind", choices=list(PROCESSES), default="engine")
    parser.add_argument("--share-gpu", action="store_true")
    parser.add_argument("--set", action="append", default=[], metavar="OPTION=VALUE", help="of rayllm launch")
    args = parser.parse_args()
    options = {"model": args.model, "num_replicas": 2, "num_api_servers": 2}
    options |= {name: yaml.safe_load(value) for name, _, value in (each.partition("=") for each in args.set)}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        if options.get("load_format") == "dummy":
            options["model"] = with_tokenizer(args.model, folder)
        config = Path(folder) / "options.yaml"
        config.write_text(yaml.safe_dump(options))
        ray = stack.enter_context(shared_gpu(options["num_replicas"])) if args.share_gpu else None
        url, session = stack.enter_context(launched("--config", str(config)))
        good = measure(url, ray or session, options["num_replicas"], args)
    sys.exit(not good)


if __name__ == "__main__":
    main()
