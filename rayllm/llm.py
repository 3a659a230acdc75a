"""`LLM`: the offline API. Runs the engine core in the caller's process."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from inspect import Parameter, Signature
from typing import Any, cast

from msgspec.structs import replace
from tqdm import tqdm

from rayllm.api.sampling_params import SamplingParams
from rayllm.api.types import EngineStats, GenerationRequest, Pooling, RequestOutput, TokenDelta
from rayllm.config.options import OFFLINE_BATCHED_TOKENS, EngineConfig, make_config
from rayllm.engine.build import start_engine
from rayllm.engine.engine import EngineCore
from rayllm.errors import InvalidRequestError
from rayllm.text.outputs import OutputProcessor, accumulate
from rayllm.text.tokenizer import Tokenizer, load_tokenizer

Prompt = str | list[int] | dict[str, Any]
OFFLINE_DEFAULTS = {"max_num_batched_tokens": OFFLINE_BATCHED_TOKENS}
PROMPT_FIELDS = {"prompt", "prompt_token_ids", "cache_salt"}
Message = dict[str, Any]


class LLM:
    """An engine for batches of prompts.

        with LLM("path/to/model") as llm:
            outputs = llm.generate(["Hello"], SamplingParams(max_tokens=32))

    Raises ConfigError for a bad option, ModelError for a model that cannot be served, StartupError. The options are the
    fields of `rayllm.config.options.EngineConfig`:
    """

    def __init__(self, model: str | None = None, **options: Any):
        if model is not None:
            options["model"] = model
        self.config = make_config(EngineConfig, OFFLINE_DEFAULTS | options)
        self._core: EngineCore | None = None
        skip = self.config.skip_tokenizer_init
        self.tokenizer: Tokenizer | None = None if skip else load_tokenizer(self.config.model)
        self._core = start_engine(self.config)
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts; the outputs are in the prompts' order.

        prompts: a string, a list of strings, a list of token ids, a list of those, or dicts: {"prompt": ...} or
        {"prompt_token_ids": [...]}, and, if they share cached prefixes with the same salt only, {"cache_salt": ...}.
        sampling_params: one for all, or one each. Raises InvalidRequestError, before anything runs, if a
        prompt or a parameter cannot be served.
        """
        items = _prompt_list(prompts)
        params = _params_list(sampling_params, len(items))
        return self._run([self._request(item, p) for item, p in zip(items, params, strict=True)], use_tqdm)

    def chat(
        self,
        messages: list[Message] | list[list[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer a conversation, a list of {"role": ..., "content": ...}, or several, by the model's chat template."""
        if self.tokenizer is None:
            raise InvalidRequestError(
                "chat needs a tokenizer; the engine was made with skip_tokenizer_init", "messages"
            )
        tokenizer = self.tokenizer
        texts = [tokenizer.apply_chat_template(conversation) for conversation in _conversations(messages)]
        params = _params_list(sampling_params, len(texts))
        # The template writes special tokens itself.
        requests: list[tuple[GenerationRequest, str | None]] = [
            (self._make(tokenizer.encode(text, add_special_tokens=False), p), text)
            for text, p in zip(texts, params, strict=True)
        ]
        return self._run(requests, use_tqdm)

    def embed(
        self, prompts: Prompt | Sequence[Prompt], pooling: Pooling = "last", use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """Embed prompts, in the forms that `generate` takes: each output's `embedding`, in the prompts' order.

        pooling: "last" takes the hidden state of the prompt's last token, "mean" the mean of all of them; both after
        the final norm, scaled to length 1 (L2). Raises InvalidRequestError, before anything runs.
        """
        requests = [self._request(item, SamplingParams()) for item in _prompt_list(prompts)]
        return self._run([(replace(request, pooling=pooling), text) for request, text in requests], use_tqdm)

    @property
    def engine(self) -> EngineCore:
        """The engine itself, with its limits in `info`. Raises RuntimeError once this is shut down."""
        if self._core is None:
            raise RuntimeError("this LLM has been shut down")
        return self._core

    def stats(self) -> EngineStats:
        """The engine's counters."""
        return self.engine.stats()

    def shutdown(self) -> None:
        """Stop the workers and free their memory; idempotent."""
        if self._core is not None:
            self._core.shutdown()
            self._core = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.shutdown()

    def _request(self, prompt: Prompt, params: SamplingParams) -> tuple[GenerationRequest, str | None]:
        salt = ""
        if isinstance(prompt, dict):
            salt, prompt = _read_prompt(prompt)
        text = None
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidRequestError(
                    "prompt must be token ids; the engine was made with skip_tokenizer_init", "prompt"
                )
            text, prompt = prompt, self.tokenizer.encode(prompt)
        return replace(self._make(list(prompt), params), cache_salt=salt), text

    def _make(self, ids: list[int], params: SamplingParams) -> GenerationRequest:
        if not all(issubclass(kind, int) and kind is not bool for kind in set(map(type, ids))):
            raise InvalidRequestError("prompt token ids must be integers", "prompt")
        return GenerationRequest(
            request_id=str(next(self._ids)), prompt_token_ids=ids, params=params, arrival_time=time.time()
        )

    def _run(self, requests: list[tuple[GenerationRequest, str | None]], use_tqdm: bool) -> list[RequestOutput]:
        """Run requests to their end. An exception, Ctrl-C included, aborts what is left of them."""
        core = self.engine
        processor = OutputProcessor(self.tokenizer)
        buffer = DeltaBuffer()
        totals: dict[str, RequestOutput | None] = {request.request_id: None for request, _ in requests}
        compiled = threading.Event()
        core.on_compiled = compiled.set
        try:
            # Grammars first, and all of them: a bad one stops the call before anything runs.
            for request, text in sorted(requests, key=lambda each: each[0].params.structured_outputs is None):
                core.add(request)
                processor.add(request, text)
                if request.params.stop:
                    buffer.pass_through(request.request_id)
            while core.is_compiling:
                compiled.wait()
                compiled.clear()
            with tqdm(total=len(requests), desc="Generating", unit="req", disable=not use_tqdm) as bar:
                while core.has_work():
                    deltas = core.step()
                    if deltas and deltas[0].bad_param is not None:
                        raise InvalidRequestError(str(deltas[0].stop_reason), deltas[0].bad_param)
                    outputs, to_abort = processor.process(buffer.merge(deltas))
                    core.abort(to_abort)
                    for output in outputs:
                        totals[output.request_id] = accumulate(totals[output.request_id], output)
                        bar.update(output.finished)
        except BaseException:
            core.abort(totals)
            raise
        missing = [request_id for request_id, total in totals.items() if total is None or not total.finished]
        if missing:
            raise RuntimeError(f"requests {missing} ended without an answer")
        return [total for total in totals.values() if total is not None]


def _signature() -> Signature:
    """What `LLM` takes, for editors and help(): the fields of EngineConfig with the defaults of offline use."""
    parameters = [Parameter("model", Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=str | None)]
    for name, field in EngineConfig.model_fields.items():
        if name != "model":
            default = OFFLINE_DEFAULTS.get(name, field.default)
            parameters.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=field.annotation))
    return Signature(parameters)


LLM.__signature__ = _signature()  # type: ignore[attr-defined]
LLM.__doc__ = f"{LLM.__doc__}\n" + "".join(
    f"    {name}: {' '.join((field.description or '').split())}.\n" for name, field in EngineConfig.model_fields.items()
)


class DeltaBuffer:
    """Holds back a completion's deltas until it ends, and then passes them on as one.

    Nobody reads offline completions while they grow, and turning tokens into text once costs a fraction of doing it a
    token at a time. Requests with stop strings are passed through: their text decides when they end.
    Deltas are joined as they come: kept one by one, they are so many objects that the garbage collector stalls steps.
    """

    def __init__(self) -> None:
        self._through: set[str] = set()
        self._held: dict[tuple[str, int], TokenDelta] = {}

    def pass_through(self, request_id: str) -> None:
        """Do not hold back this request."""
        self._through.add(request_id)

    def merge(self, deltas: list[TokenDelta]) -> list[TokenDelta]:
        """Take over a step's deltas; return those to process now."""
        ready = []
        for delta in deltas:
            if delta.request_id in self._through:
                ready.append(delta)
                continue
            key = (delta.request_id, delta.index)
            held = self._held.setdefault(key, delta)
            if held is not delta:
                held.token_ids.extend(delta.token_ids)
                if held.logprobs is not None:
                    held.logprobs.extend(delta.logprobs or [])
            if delta.finish_reason is not None:
                del self._held[key]
                ready.append(
                    replace(
                        held,
                        finish_reason=delta.finish_reason,
                        stop_reason=delta.stop_reason,
                        num_preemptions=delta.num_preemptions,
                        cumulative_logprob=delta.cumulative_logprob,
                    )
                )
        return ready


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Tell one prompt (a string, a dict, a non-empty list of ids) from a list of prompts."""
    if isinstance(prompts, str | dict):
        return [prompts]
    items = list(prompts)
    if items and all(isinstance(item, int) for item in items):
        return [cast(list[int], items)]
    for item in items:
        if not isinstance(item, str | dict | list | tuple):
            raise InvalidRequestError(
                f"a prompt is a string, a list of token ids or a dict of them, not {type(item).__name__}", "prompt"
            )
    return cast(list[Prompt], items)


def _read_prompt(fields: dict[str, Any]) -> tuple[str, str | list[int]]:
    """(cache salt, text or token ids) of a prompt that is a dict."""
    if not fields.keys() <= PROMPT_FIELDS or len(fields.keys() & {"prompt", "prompt_token_ids"}) != 1:
        message = f"a prompt dict has prompt or prompt_token_ids, and perhaps cache_salt, not {sorted(fields)}"
        raise InvalidRequestError(message, "prompt")
    salt = fields.get("cache_salt", "")
    if not isinstance(salt, str):
        raise InvalidRequestError(f"cache_salt must be a string, not {salt!r}", "cache_salt")
    if not isinstance(fields.get("prompt", ""), str):
        raise InvalidRequestError(f"prompt must be a string in a dict, not {fields['prompt']!r}", "prompt")
    if not isinstance(fields.get("prompt_token_ids", []), list | tuple):
        raise InvalidRequestError("prompt_token_ids must be a list of token ids", "prompt_token_ids")
    return salt, fields.get("prompt") or fields.get("prompt_token_ids") or []


def _conversations(messages: list[Message] | list[list[Message]]) -> list[list[Message]]:
    """Tell one conversation from a list of them."""
    if messages and isinstance(messages[0], dict):
        return [messages]
    return cast(list[list[Message]], messages)


def _params_list(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise InvalidRequestError(
            f"sampling_params has {len(params)} entries for {count} prompts; give one, or one each", "sampling_params"
        )
    return list(params)
