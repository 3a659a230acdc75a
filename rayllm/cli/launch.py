"""`rayllm launch`: serve models over HTTP."""

from __future__ import annotations

import os
import sys
import time
from typing import Annotated, Any

import typer

from rayllm.cli.options import config_flags, deployment_config
from rayllm.config.options import EngineConfig, ServerConfig

_STARTED = time.monotonic()


@config_flags(EngineConfig, ServerConfig)
def launch(
    startup_timeout: Annotated[
        float, typer.Option(min=1, help="Seconds to wait for the engines (and their nodes).")
    ] = 1800,
    **options: Any,
) -> None:
    """Serve models over HTTP with the OpenAI API.

    The server runs on the Ray cluster that is running, else on this machine. On SIGUSR1 it reads the file of --config
    again and changes over to what that says without losing a request.
    """
    # Threads of Ray Serve may call Ray once more after this process has left it, for which Ray would start a cluster.
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")  # Ray reads it when it is imported
    from rayllm.serve.cluster.launch import Ready, describe_start, start_server

    models, server = deployment_config(options)

    def report(text: str) -> None:
        print(f"rayllm: {text}", file=sys.stderr, flush=True)

    def show(ready: Ready) -> None:
        for model, engine in zip(ready.models, ready.engines, strict=True):
            print("\n".join(describe_start(engine)))
            replicas = f", {model.server.num_replicas} replicas" if model.server.num_replicas > 1 else ""
            print(f"model    {model.name}  ({model.engine.options.model}{replicas})")
        body = f'{{"model": "{ready.models[0].name}", "prompt": "Hello", "max_tokens": 16}}'
        total, phases = time.monotonic() - _STARTED, ", ".join(f"{name} {s:.1f}" for name, s in ready.phases)
        print(f"address  {ready.url}/v1")
        print(f"try      curl {ready.url}/v1/completions -H 'content-type: application/json' -d '{body}'")
        print(f"ready    after {total:.1f} s ({phases}); Ctrl-C stops the server", flush=True)

    report(f"starting {', '.join(model.engine.model for model in models)}")
    reread = None if options["config"] is None else lambda: deployment_config(options)
    start_server(models, server, on_ready=show, report=report, reread=reread, startup_timeout=startup_timeout)
