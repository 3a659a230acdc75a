"""`/v1/embeddings`: the body, its way to the engine and the answer.

Any model serves them: an embedding is a hidden state of the prompt after the model's final norm, the last token's or
the mean of all tokens', scaled to length 1 as OpenAI's are.
"""

from __future__ import annotations

import base64
import sys
import time
from array import array
from typing import Any, Literal

import orjson
from pydantic import Field, field_validator

from rayllm.api.sampling_params import SamplingParams
from rayllm.api.types import EngineInfo, GenerationRequest, Pooling, RequestOutput
from rayllm.errors import InvalidRequestError
from rayllm.serve.http.convert import ContextLengthError, Job, Tokenizer, checked, encode
from rayllm.serve.http.errors import request_failed
from rayllm.serve.http.protocol import Prompt, is_ids
from rayllm.serve.http.protocol_parts import Body

MAX_INPUTS = 2048  # of one request, as OpenAI has it


class EmbeddingBody(Body):
    """POST /v1/embeddings. input: a string, a list of strings, a list of ids or a list of lists of ids.

    dimensions: only the model's own number. pooling (an extension): "last" if absent.
    """

    model: str | None = None
    input: Any
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None  # client metadata without any effect on the answer
    # Extensions.
    pooling: Pooling | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = Field(default=None, max_length=256)
    priority: int | None = Field(default=None, ge=-(2**31), lt=2**31)

    @field_validator("input")
    @classmethod
    def _check_input(cls, value: Any) -> Any:
        if isinstance(value, str) or is_ids(value):
            return value
        if not isinstance(value, list) or not (all(isinstance(each, str) for each in value) or all(map(is_ids, value))):
            if isinstance(value, list) and [] in value:
                raise InvalidRequestError("input must not hold an empty list", "input")
            raise InvalidRequestError(
                "input must be a string, a list of strings, a list of token ids or a list of lists of token ids",
                "input",
            )
        if not 1 <= len(value) <= MAX_INPUTS:
            raise InvalidRequestError(f"input takes 1 to {MAX_INPUTS} entries, not {len(value)}", "input")
        return value

    @property
    def stream(self) -> bool:
        return False

    def inputs(self) -> list[Prompt]:
        """The inputs one by one, each a text or a list of token ids."""
        return [self.input] if isinstance(self.input, str) or is_ids(self.input) else self.input


async def embedding_job(body: EmbeddingBody, job_id: str, info: EngineInfo, tokenizer: Tokenizer | None) -> Job:
    """Raises InvalidRequestError naming field and limit if any of the inputs can't be served."""
    if body.dimensions not in (None, info.hidden_size):
        raise InvalidRequestError(
            f"dimensions must be {info.hidden_size}, the size of this model's embeddings, or left out; "
            f"not {body.dimensions}",
            "dimensions",
        )
    special = body.add_special_tokens if body.add_special_tokens is not None else True
    requests, texts = [], []
    for index, each in enumerate(body.inputs()):
        ids = await encode(each, special, tokenizer, param="input")
        if len(ids) > info.max_model_len:
            message = f"input has {len(ids)} tokens; this model's context is {info.max_model_len} tokens"
            raise ContextLengthError(message, "input")
        request = GenerationRequest(
            request_id=f"{job_id}-{index}",
            prompt_token_ids=ids,
            params=SamplingParams(),
            priority=body.priority or 0,
            arrival_time=time.time(),
            cache_salt=body.cache_salt or "",
            pooling=body.pooling or "last",
        )
        requests.append(checked(request, info, "input"))
        texts.append(each if isinstance(each, str) else None)
    return Job(requests, texts)


class EmbeddingReply:
    """Answers POST /v1/embeddings, always whole."""

    def __init__(self, body: EmbeddingBody, job: Job, model: str):
        self._base64 = body.encoding_format == "base64"
        self._model = model
        self._embeddings: list[array[float]] = [array("f") for _ in job.requests]
        self._prompt_tokens = sum(len(request.prompt_token_ids) for request in job.requests)

    def collect(self, prompt_index: int, output: RequestOutput) -> None:
        """Add one output. Raises ApiError if the engine failed on the request."""
        for completion in output.outputs:
            if completion.finish_reason == "error":
                raise request_failed(completion.stop_reason)
        if output.embedding is not None:
            self._embeddings[prompt_index] = output.embedding

    def whole(self) -> dict[str, Any]:
        """The answer as one JSON object, after the last output was collected."""
        data = [
            {"object": "embedding", "index": index, "embedding": self._encoded(values)}
            for index, values in enumerate(self._embeddings)
        ]
        usage = {"prompt_tokens": self._prompt_tokens, "total_tokens": self._prompt_tokens}
        return {"object": "list", "data": data, "model": self._model, "usage": usage}

    def _encoded(self, values: array[float]) -> orjson.Fragment | str:
        """A list, as JSON that takes less memory than its floats, or the base64 of the little-endian float32 values."""
        if self._base64:
            little_endian = array("f", values)
            if sys.byteorder == "big":
                little_endian.byteswap()
            return base64.b64encode(little_endian).decode()
        return orjson.Fragment(orjson.dumps(values.tolist()))
