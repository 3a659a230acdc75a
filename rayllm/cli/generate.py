"""`rayllm generate`: complete prompts in this process."""

from __future__ import annotations

import json

from rayllm.api.sampling_params import SamplingParams
from rayllm.config.options import EngineConfig


def run_generate(config: EngineConfig, prompts: list[str], params: SamplingParams, json_lines: bool) -> None:
    """Print the completions in the prompts' order, a prompt's best first where it has several. Raises RayllmError."""
    from rayllm.llm import LLM

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
