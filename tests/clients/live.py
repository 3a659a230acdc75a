"""A live server for clients of others: the bundled model on CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from support.launched import BUNDLED, Launched, free_port

# Live completions that the server takes: small enough that one request with n=128 fills it, and the next meets a 429.
LIMITS = ("--max-num-seqs", "32", "--max-queued-requests", "100")


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Its log is in `folder`; yields the server's URL. Fails if it does not end cleanly on SIGINT."""
    port = free_port()
    server = Launched(folder / "log", str(BUNDLED), "--port", str(port), "--device", "cpu", *LIMITS)
    try:
        server.wait_for("\nready ")
        yield f"http://127.0.0.1:{port}"
        assert server.stop() == 0, server.log.read_text()
    finally:
        server.kill()
