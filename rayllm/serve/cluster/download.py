"""Names of models to folders in a process of its own, which can be stopped at any time and leaves no threads behind.

`rayllm launch` forks, for which there may be no threads, and while it serves it has other things to watch. The process
is this module run as a script: JSON on standard input and output.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import rayllm.errors
from rayllm.config.options import EngineConfig, ModelConfig
from rayllm.errors import RayllmError, StartupError
from rayllm.hub import local_engine, needs_hub, with_engine
from rayllm.parent_death import end_with_parent


def local_models(
    models: Sequence[ModelConfig], goes_on: Callable[[], bool] | None = None, every_s: float = 1.0
) -> list[ModelConfig]:
    """The models with folders in place of names on the hub, their adapters too, which are downloaded if need be.

    goes_on: is called every so many seconds while that lasts, and says whether to go on. Raises ConfigError or
    ModelError, StartupError if it is not to.
    """
    if not any(needs_hub(model.engine) for model in models):
        return [with_engine(model, local_engine(model.engine)) for model in models]
    command = [sys.executable, "-m", "rayllm.serve.cluster.download"]
    asked: str | None = json.dumps([model.engine.model_dump() for model in models])
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        while True:
            try:
                answer, _ = process.communicate(asked, timeout=None if goes_on is None else every_s)
                break
            except subprocess.TimeoutExpired:
                asked = None  # it is on its way
                if goes_on is not None and not goes_on():
                    process.kill()
                    raise StartupError("the download of a model was stopped") from None
            except BaseException:
                process.kill()
                raise
    if process.returncode:
        raise StartupError(f"the download of a model has ended with exit code {process.returncode}")
    read = json.loads(answer)
    if "error" in read:
        raise getattr(rayllm.errors, read["kind"])(read["error"])
    return [with_engine(model, EngineConfig(**options)) for model, options in zip(models, read["engines"], strict=True)]


def main() -> None:
    """Answer one question of `local_models`."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends this at once, downloads in threads included
    try:
        engines = [local_engine(EngineConfig(**options)) for options in json.load(sys.stdin)]
        answer: dict[str, Any] = {"engines": [engine.model_dump() for engine in engines]}
    except RayllmError as error:
        answer = {"kind": type(error).__name__, "error": str(error)}
    print(json.dumps(answer), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
