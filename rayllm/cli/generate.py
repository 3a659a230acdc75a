"""`rayllm generate`: complete prompts in this process."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any, cast

import typer

from rayllm.api.sampling_params import SamplingParams
from rayllm.cli.options import config_flags, engine_config
from rayllm.config.options import EngineConfig


@config_flags(EngineConfig, positional_model=False)
def generate(
    prompts: Annotated[list[str] | None, typer.Argument(metavar="PROMPT", help="Standard input if none.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 always takes the most likely token.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Keep the most likely tokens up to this probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep this many tokens; 0 keeps all.")] = 0,
    n: Annotated[int, typer.Option("--n", help="Completions of each prompt.")] = 1,
    best_of: Annotated[int | None, typer.Option(help="Samples or beams to choose them from; n if absent.")] = None,
    use_beam_search: Annotated[bool, typer.Option(help="Look for the most likely texts, with best_of beams.")] = False,
    length_penalty: Annotated[float, typer.Option(help="Of beams: below 1 prefers short texts.")] = 1.0,
    early_stopping: Annotated[str, typer.Option(metavar="[false|true|never]", help="When beam search ends.")] = "false",
    sampling_seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends a completion; may be repeated.")] = None,
    json_lines: Annotated[bool, typer.Option("--json", help="Print one JSON object a completion.")] = False,
    **options: Any,
) -> None:
    """Complete prompts with a model in this process."""
    from rayllm.llm import LLM

    prompts = prompts or [sys.stdin.read()]
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
    with LLM(**config.model_dump()) as llm:
        outputs = llm.generate(prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        for completion in output.outputs:
            if json_lines:
                fields = {"prompt": prompt, "text": completion.text, "finish_reason": completion.finish_reason}
                print(json.dumps(fields, ensure_ascii=False))
            elif len(prompts) * n == 1:
                print(completion.text)
            else:
                print(f"> {prompt}\n{completion.text}\n")
