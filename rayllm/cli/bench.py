"""`rayllm bench`: runs scripts of benchmarks/, which an installed package has as `rayllm_benchmarks`.

A script reads its own arguments, --help included, so its flags are declared there.
"""

from __future__ import annotations

import typer

from rayllm.cli.options import make_app

app = make_app("Measure the engine, a running server or the kernels.")

_ALL_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command(context_settings=_ALL_ARGUMENTS)
def offline(context: typer.Context) -> None:
    """Measure the engine in this process."""
    from rayllm_benchmarks.offline import app as script

    script(context.args, prog_name=context.command_path)


@app.command(context_settings=_ALL_ARGUMENTS)
def serve(context: typer.Context) -> None:
    """Measure a running server with guidellm."""
    from rayllm_benchmarks.serve import app as script

    script(context.args, prog_name=context.command_path)


@app.command(context_settings=_ALL_ARGUMENTS)
def kernels(context: typer.Context) -> None:
    """Measure the kernels on one GPU."""
    from rayllm_benchmarks.kernel_times import app as script

    script(context.args, prog_name=context.command_path)
