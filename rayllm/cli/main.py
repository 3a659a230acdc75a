"""The `rayllm` command. Each subcommand imports what it needs when it runs, so that `rayllm --help` is quick."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from rayllm.cli import bench
from rayllm.cli.batch import batch
from rayllm.cli.chat import chat
from rayllm.cli.collect_env import print_environment
from rayllm.cli.generate import generate
from rayllm.cli.launch import launch
from rayllm.cli.options import make_app
from rayllm.cli.status import status
from rayllm.errors import ConfigError, InvalidRequestError, RayllmError

app = make_app("Distributed LLM serving on Ray.", completion=True)
app.command()(launch)
app.command()(generate)
app.command()(batch)
app.command()(chat)
app.command()(status)
app.add_typer(bench.app, name="bench")
app.command("collect-env")(print_environment)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False) -> None:
    if version:
        from rayllm.version import __version__

        print(__version__)
        raise typer.Exit


def main(command: typer.Typer = app) -> None:
    """Run a command of `sys.argv`. Exit codes: 0; 2 for bad options, models and requests; 1 for engines that fail."""
    try:
        command()
    except RayllmError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError | InvalidRequestError) else 1)
