"""How fast a host gets a checkpoint from another one, beside one bare TCP connection between the same two.

    python benchmarks/checkpoint_copy.py [--mib 1024] [--runs 3] [--folder /tmp/checkpoint-copy]

To be run on a host of a Ray cluster with others. Each run copies a folder of random bytes, a file of a quarter of
--mib and one of the rest, to one other host, as `rayllm launch` has engines do it, and then sends as many bytes of the
same file over a connection. Removes all files at the end.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import threading
import time
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayllm.executor.checkpoints import fetch_checkpoint, offer_checkpoint
from rayllm.executor.ray_cluster import connect_to_ray

MIB = 2**20


def make_files(folder: Path, mib: int) -> None:
    folder.mkdir()
    for name, size in (("model-1.safetensors", mib // 4), ("model-2.safetensors", mib - mib // 4)):
        with (folder / name).open("wb") as file:
            for _ in range(size):
                file.write(os.urandom(MIB))


def copy(folder: str) -> tuple[int, float]:
    """On the other host: (bytes, seconds)."""
    began = time.monotonic()
    count = fetch_checkpoint(folder)
    seconds = time.monotonic() - began
    shutil.rmtree(folder)
    return count, seconds


def receive(address: tuple[str, int]) -> tuple[int, float]:
    """On the other host: (bytes, seconds) of what comes over a connection, which is dropped."""
    began, count, buffer = time.monotonic(), 0, bytearray(MIB)
    with socket.create_connection(address) as connection:
        while size := connection.recv_into(buffer):
            count += size
    return count, time.monotonic() - began


def send(listener: socket.socket, path: Path) -> None:
    connection, _ = listener.accept()
    with connection, path.open("rb") as file:
        connection.sendfile(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--folder", default="/tmp/checkpoint-copy")
    args = parser.parse_args()
    folder = Path(args.folder)
    connect_to_ray()
    here = ray.get_runtime_context().get_node_id()
    other = next(node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != here)
    on_other = {"scheduling_strategy": NodeAffinitySchedulingStrategy(other, soft=False), "num_cpus": 0}
    try:
        make_files(folder, args.mib)
        withdraw = offer_checkpoint(str(folder), here)
        for _ in range(args.runs):
            copied, seconds = ray.get(ray.remote(copy).options(**on_other).remote(str(folder)))
            with socket.create_server((ray.util.get_node_ip_address(), 0)) as listener:
                sender = threading.Thread(target=send, args=(listener, folder / "model-2.safetensors"))
                sender.start()
                sent, bare = ray.get(ray.remote(receive).options(**on_other).remote(listener.getsockname()))
                sender.join()
            print(
                f"copy {copied / MIB / seconds:,.0f} MiB/s, bare connection {sent / MIB / bare:,.0f} MiB/s", flush=True
            )
        withdraw()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
