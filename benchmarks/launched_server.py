"""`rayllm launch`, for the benchmarks of the HTTP service, and a tokenizer for shapes without one."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

START_LIMIT_S = 120.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def launched(*options: str) -> Iterator[tuple[str, int]]:
    """The whole stack, ready: its address, and the session that all of its processes are in."""
    port = free_port()
    command = [sys.executable, "-m", "rayllm.cli", "launch", "--port", str(port), *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_LIMIT_S
        while not healthy(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the server did not come up")
            time.sleep(0.2)
        yield url, process.pid
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def with_tokenizer(model: str, folder: str) -> str:
    """Make `folder` a model of the same shape with a tokenizer of made-up words: what has no text is not streamed."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import Metaspace
    from tokenizers.models import WordLevel

    config = json.loads((Path(model) / "config.json").read_text())
    words = {f"\u2581w{i}": i for i in range(config["vocab_size"])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="\u2581w0"))
    tokenizer.decoder = Metaspace()
    shutil.copy(Path(model) / "config.json", folder)
    tokenizer.save(f"{folder}/tokenizer.json")
    (Path(folder) / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder
