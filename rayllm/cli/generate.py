"""`rayllm generate`: complete prompts in this process."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer
from pydantic import BaseModel, Field

from rayllm.api.sampling_params import SamplingParams
from rayllm.cli.options import config_flags, engine_config
from rayllm.config.options import EngineConfig
from rayllm.errors import InvalidRequestError


class SamplingFlags(BaseModel):
    """The sampling parameters that are flags, most under their own names; `SamplingParams` checks them."""

    max_tokens: int = Field(128, description="Tokens to generate at most")
    temperature: float = Field(1.0, description="0 always takes the most likely token")
    top_p: float = Field(1.0, description="Keep the most likely tokens up to this probability")
    top_k: int = Field(0, description="Keep this many tokens; 0 keeps all")
    n: int = Field(1, description="Completions of each prompt")
    best_of: int | None = Field(None, description="Samples or beams to choose them from; n if absent")
    use_beam_search: bool = Field(False, description="Look for the most likely texts, with best_of beams")
    length_penalty: float = Field(1.0, description="Of beams: below 1 prefers short texts")
    early_stopping: str = Field("false", description="When beam search ends: false, true or never")
    sampling_seed: int | None = Field(None, description="The same seed gives the same text")
    stop: list[str] | None = Field(None, description="Text that ends a completion; may be repeated")


@config_flags(SamplingFlags, EngineConfig, positional_model=False)
def generate(
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT", help="Standard input, without its last newline, if none.")
    ] = None,
    json_lines: Annotated[bool, typer.Option("--json", help="Print one JSON object a completion.")] = False,
    **options: Any,
) -> None:
    """Complete prompts with a model in this process."""
    from rayllm.llm import LLM

    prompts = prompts or [_prompt_of_standard_input()]
    config = engine_config(options)
    fields = SamplingFlags(**{name: value for name, value in options.items() if value is not None}).model_dump()
    early_stopping = fields.pop("early_stopping")
    params = SamplingParams(
        seed=fields.pop("sampling_seed"),
        early_stopping={"false": False, "true": True}.get(early_stopping, early_stopping),
        **fields,
    )
    with LLM(**config.model_dump()) as llm:
        outputs = llm.generate(prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        for completion in output.outputs:
            if json_lines:
                fields = {"prompt": prompt, "text": completion.text, "finish_reason": completion.finish_reason}
                print(json.dumps(fields, ensure_ascii=False))
            elif len(prompts) * params.n == 1:
                print(completion.text)
            else:
                print(f"> {prompt}\n{completion.text}\n")


def _prompt_of_standard_input() -> str:
    """All of it, without the newline that `echo` and editors put at the end. Raises InvalidRequestError."""
    try:
        prompt = sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"standard input is not UTF-8 text: {error.reason}") from None
    if not prompt:
        raise InvalidRequestError("there is no prompt: give one as an argument or on standard input")
    return prompt
