"""A live server for clients of others: the bundled model on CPU, with a chat template that shows tools."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from support.chat_templates import HERMES
from support.launched import BUNDLED, MODEL, Launched, free_port

# Live completions that the server takes: small enough that one request with n=128 fills it, and the next meets a 429.
LIMITS = ("--max-num-seqs", "32", "--max-queued-requests", "100")


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Serve a model made in `folder`; yields the server's URL. Fails if it does not end cleanly on SIGINT."""
    model = shutil.copytree(BUNDLED, folder / MODEL)
    (model / "chat_template.jinja").write_text(HERMES)
    port = free_port()
    server = Launched(folder / "log", str(model), "--port", str(port), "--device", "cpu", *LIMITS)
    try:
        server.wait_for("\nready ")
        yield f"http://127.0.0.1:{port}"
        assert server.stop() == 0, server.log.read_text()
    finally:
        server.kill()
