"""The `rayllm` command. Each subcommand imports what it needs when it runs, so that `rayllm --help` is quick."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any, cast

import typer

from rayllm.bench_serve_load import ServeBenchOptions
from rayllm.cli.options import config_flags, deployment_config, engine_config
from rayllm.config.options import OFFLINE_BATCHED_TOKENS, EngineConfig, ServerConfig
from rayllm.errors import ConfigError, InvalidRequestError, RayllmError

_STARTED = time.monotonic()

app = typer.Typer(
    name="rayllm",
    help="Distributed LLM serving on Ray.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # the boxes cut long flags off
)
bench_app = typer.Typer(help="Measure the engine.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")

MaxTokens = Annotated[int, typer.Option(help="Tokens to generate at most.")]
Temperature = Annotated[float, typer.Option(help="0 always takes the most likely token.")]
ApiKey = Annotated[
    str | None, typer.Option(envvar="RAYLLM_API_KEY", help="Key of the server; better set the variable.")
]


def main() -> None:
    """Entry point. Exit codes: 0; 2 for bad options, models and requests; 1 for engines that fail."""
    try:
        app()
    except RayllmError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError | InvalidRequestError) else 1)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False) -> None:
    if version:
        import rayllm

        print(rayllm.__version__)
        raise typer.Exit


@app.command()
@config_flags(EngineConfig, ServerConfig)
def launch(
    startup_timeout: Annotated[float, typer.Option(help="Seconds to wait for the engine (and its nodes).")] = 1800,
    **options: Any,
) -> None:
    """Serve models over HTTP with the OpenAI API, on this machine or on the Ray cluster that is running.

    SIGUSR1 makes it read the file of --config again, and change over to what that says without losing a request.
    """
    from rayllm.serve.cluster.launch import Ready, describe_start, start_server

    models, server = deployment_config(options)

    def note(text: str) -> None:
        print(f"rayllm: {text}", file=sys.stderr, flush=True)

    def show(ready: Ready) -> None:
        total = time.monotonic() - _STARTED
        parts = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in ready.phases.items())
        body = f'{{"model": "{ready.models[0].name}", "prompt": "Hello", "max_tokens": 16}}'
        for model in ready.models:
            print("\n".join(describe_start(model.engine)))
            times = f", {model.num_replicas} replicas" if model.num_replicas > 1 else ""
            print(f"model    {model.name}  ({model.folder}{times})")
        print(f"address  {ready.url}/v1")
        print(f"try      curl {ready.url}/v1/completions -H 'content-type: application/json' -d '{body}'")
        print(f"ready    after {total:.1f} s ({parts}); Ctrl-C stops the server", flush=True)

    note(f"starting {', '.join(model.engine.model for model in models)}")
    reread = None if options["config"] is None else lambda: deployment_config(options)
    start_server(models, server, on_ready=show, report=note, reread=reread, startup_timeout=startup_timeout)


@app.command()
@config_flags(EngineConfig, positional_model=False)
def generate(
    prompts: Annotated[list[str] | None, typer.Argument(metavar="[PROMPT]...", help="Standard input if none.")] = None,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 1.0,
    top_p: Annotated[float, typer.Option(help="Keep the most likely tokens up to this probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep this many tokens; 0 keeps all.")] = 0,
    n: Annotated[int, typer.Option("--n", help="Completions of each prompt.")] = 1,
    best_of: Annotated[int | None, typer.Option(help="Choose them from so many samples or beams; n if absent.")] = None,
    use_beam_search: Annotated[bool, typer.Option(help="Look for the most likely texts, with best_of beams.")] = False,
    length_penalty: Annotated[float, typer.Option(help="Of beams: below 1 prefers short texts.")] = 1.0,
    early_stopping: Annotated[str, typer.Option(metavar="[false|true|never]", help="When beam search ends.")] = "false",
    sampling_seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends a completion; may be repeated.")] = None,
    json_lines: Annotated[bool, typer.Option("--json", help="One JSON object a completion.")] = False,
    **options: Any,
) -> None:
    """Complete prompts with a model in this process."""
    from rayllm.api.sampling_params import SamplingParams
    from rayllm.cli.generate import run_generate

    config = engine_config(options)
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        n=n,
        best_of=best_of,
        use_beam_search=use_beam_search,
        length_penalty=length_penalty,
        early_stopping={"false": False, "true": True}.get(early_stopping, cast(Any, early_stopping)),
        seed=sampling_seed,
        stop=stop or [],
    )
    run_generate(config, prompts or [sys.stdin.read()], params, json_lines)


@app.command()
def chat(
    url: Annotated[str, typer.Option(help="Address of a running server.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Its model; the first one it lists if absent.")] = None,
    api_key: ApiKey = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens of an answer at most.")] = None,
    temperature: Temperature = 1.0,
) -> None:
    """Talk to a running server. /help lists what else there is; an empty line or /exit leaves."""
    from rayllm.cli.chat import Chat

    Chat(url, model, system, max_tokens, temperature, api_key).run()


@bench_app.command("offline")
@config_flags(EngineConfig)
def bench_offline(
    workload: Annotated[list[str] | None, typer.Option(help="Name of a workload; may be repeated.")] = None,
    num_prompts: Annotated[int | None, typer.Option(help="Instead of a workload: how many prompts.")] = None,
    input_len: Annotated[str, typer.Option(help="Tokens of a prompt, or a range A:B.")] = "512",
    output_len: Annotated[str, typer.Option(help="Tokens to generate, or a range A:B.")] = "128",
    warmup: Annotated[int, typer.Option(help="Runs that are not measured.")] = 1,
    repeat: Annotated[int, typer.Option(help="Runs that are measured; the median counts.")] = 3,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
    **options: Any,
) -> None:
    """Throughput and latency of the engine in this process, without HTTP and tokenizer."""
    from rayllm.bench import custom_workload, named_workload, print_results, run_benchmark

    if workload and num_prompts is not None:
        raise ConfigError("give --workload or --num-prompts, not both")
    workloads = [named_workload(name) for name in workload or ([] if num_prompts is not None else ["bs1_128_256"])]
    if num_prompts is not None:
        workloads.append(custom_workload(num_prompts, input_len, output_len))
    config = engine_config(options, skip_tokenizer_init=True, max_num_batched_tokens=OFFLINE_BATCHED_TOKENS)
    print_results(run_benchmark(config, workloads, warmup=warmup, repeat=repeat), json_output)


@bench_app.command("serve")
@config_flags(ServeBenchOptions, positional_model=False)
def bench_serve(
    api_key: ApiKey = None,
    out: Annotated[str | None, typer.Option(help="Save the report and all requests as JSON.")] = None,
    plot: Annotated[str | None, typer.Option(help="Save latencies and throughput over time as SVG.")] = None,
    **options: Any,
) -> None:
    """Throughput and latency of a running server, as its clients see them. Exit code 1 if a request failed."""
    from rayllm.bench_serve import bench_server

    if bench_server(options, api_key, out, plot) > 0:
        raise typer.Exit(1)


@bench_app.command("kernels")
def bench_kernels(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Begin of a case's name; all.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object a case.")] = False,
) -> None:
    """The kernels one by one on one GPU: time, figure, floor and ratio of each shape."""
    from rayllm.bench_kernels import run_kernel_benchmark

    run_kernel_benchmark(names or [], json_output)


@app.command("collect-env")
def collect_env() -> None:
    """Versions, hardware and settings for a bug report; nothing secret."""
    from rayllm.cli.collect_env import print_environment

    print_environment()
