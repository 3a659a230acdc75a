"""Requests of every kind: all that a request can have, so that what happens to one can be tried on each."""

from __future__ import annotations

import json

from rayllm.api.sampling_params import SamplingParams, StructuredOutputs
from rayllm.api.types import GenerationRequest
from rayllm.text.tokenizer import Tokenizer

TEXT = "The for statement is used to iterate over the elements of a sequence"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 30}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
EVERY_KIND = {
    "greedy": {"temperature": 0.0},
    "samples": {"n": 4, "temperature": 1.2, "top_p": 0.9},
    "best_of": {"n": 2, "best_of": 4, "temperature": 1.0},
    "penalties": {"temperature": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    "logprobs": {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2},
    "stop string": {"temperature": 0.0, "stop": ["of the"]},
    "min_tokens": {"temperature": 1.0, "min_tokens": 30, "ignore_eos": False},
    "beams": {"use_beam_search": True, "best_of": 3, "n": 2, "temperature": 0.0},
    "grammar": {"temperature": 1.0, "structured_outputs": StructuredOutputs(json=json.dumps(SCHEMA))},
}


def requests_of_every_kind(tokenizer: Tokenizer) -> list[GenerationRequest]:
    """With the same noise in every call; the last is an embedding."""
    prompt = tokenizer.encode(TEXT)
    requests = []
    for seed, (name, params) in enumerate(EVERY_KIND.items()):
        ids = [*prompt, *tokenizer.encode(" " + name)]
        sampling = SamplingParams(max_tokens=40, seed=seed, **params)
        requests.append(GenerationRequest(request_id=name, prompt_token_ids=ids, params=sampling))
    pooled = {"request_id": "embedding", "prompt_token_ids": prompt * 6, "params": SamplingParams()}
    return [*requests, GenerationRequest(**pooled, pooling="mean")]
