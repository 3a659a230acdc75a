"""`rayllm bench`: runs scripts of benchmarks/, which an installed package has as `rayllm_benchmarks`.

A script reads its own arguments, --help included, so its flags are declared there.
"""

from __future__ import annotations

from importlib import import_module

import typer

from rayllm.cli.options import make_app

app = make_app("Measure the engine, a running server or the kernels.")


def _add(name: str, script: str, text: str) -> None:
    all_arguments = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

    @app.command(name, help=text, context_settings=all_arguments)
    def run(context: typer.Context) -> None:
        import_module(f"rayllm_benchmarks.{script}").app(context.args, prog_name=context.command_path)


_add("offline", "offline", "Measure the engine in this process.")
_add("serve", "serve", "Measure a running server with guidellm.")
_add("kernels", "kernel_times", "Measure the kernels on one GPU.")
