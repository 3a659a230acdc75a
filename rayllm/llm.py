"""`LLM`: the offline API. Runs the engine core in the caller's process."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from inspect import Parameter, Signature
from types import FrameType
from typing import Any, cast

import msgspec
from tqdm import tqdm

from rayllm.api.sampling_params import SamplingParams
from rayllm.api.types import Abort, EngineStats, GenerationRequest, Pooling, RequestOutput
from rayllm.config.model_folder import load_model_spec
from rayllm.config.options import OFFLINE_BATCHED_TOKENS, EngineConfig, make_config
from rayllm.engine.build import start_engine
from rayllm.engine.delta_buffer import DeltaBuffer
from rayllm.engine.engine import EngineCore
from rayllm.errors import InvalidRequestError
from rayllm.hub import local_adapter, local_engine
from rayllm.text.bad_words import bad_token_ids
from rayllm.text.outputs import OutputProcessor, accumulate
from rayllm.text.tokenizer import Tokenizer, load_tokenizer

Prompt = str | list[int] | dict[str, Any]
OFFLINE_DEFAULTS = {"max_num_batched_tokens": OFFLINE_BATCHED_TOKENS}
Message = dict[str, Any]
Adapters = str | Sequence[str | None] | None


class PromptFields(msgspec.Struct, forbid_unknown_fields=True):
    """A prompt as a dict: text or token ids."""

    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    # Cached prefixes are shared with prompts of the same salt only.
    cache_salt: str = ""


class LLM:
    """An engine for batches of prompts.

        with LLM("path/to/model") as llm:
            outputs = llm.generate(["Hello"], SamplingParams(max_tokens=32))

    A name on the Hugging Face Hub, as LLM("org/name"), is downloaded if need be; `config.model` is its folder then.
    Raises ConfigError for a bad option, ModelError for a model that cannot be served, StartupError. The options are the
    fields of `rayllm.config.options.EngineConfig`:
    """

    def __init__(self, model: str | None = None, **options: Any):
        if model is not None:
            options["model"] = model
        self.config = local_engine(make_config(EngineConfig, OFFLINE_DEFAULTS | options))
        self._core: EngineCore | None = None
        load_model_spec(self.config.model)  # says what is wrong with a folder before its tokenizer is missed
        skip = self.config.skip_tokenizer_init
        self.tokenizer: Tokenizer | None = None if skip else load_tokenizer(self.config.model)
        self._core = start_engine(self.config)
        self._ids = itertools.count()
        self._bad_words: tuple[list[str], list[list[int]]] = [], []  # the latest, and their tokens

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        adapter: Adapters = None,
    ) -> list[RequestOutput]:
        """Complete prompts; the outputs are in the prompts' order.

        prompts: a string, a list of strings, a list of token ids, a list of those, or dicts: {"prompt": ...} or
        {"prompt_token_ids": [...]}, and, if they share cached prefixes with the same salt only, {"cache_salt": ...}.
        sampling_params: one for all, or one each; those of `get_default_sampling_params` if absent. adapter: the name
        of a loaded adapter for all, or one each, None for none. Raises InvalidRequestError, before anything runs, if a
        prompt or a parameter cannot be served.
        """
        items = _prompt_list(prompts)
        params, adapters = self._params_list(sampling_params, len(items)), _adapter_list(adapter, len(items))
        requests = [self._request(item, p, adapter=a) for item, p, a in zip(items, params, adapters, strict=True)]
        return self._run(requests, use_tqdm)

    def chat(
        self,
        messages: list[Message] | list[list[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        adapter: Adapters = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, a list of {"role": ..., "content": ...}, or several, by the model's chat template.

        adapter: as for `generate`.
        """
        tokenizer = self._need_tokenizer("messages", "chat needs a tokenizer")
        conversations = [messages] if messages and isinstance(messages[0], dict) else messages
        texts = [tokenizer.apply_chat_template(cast(list[Message], conversation)) for conversation in conversations]
        params, adapters = self._params_list(sampling_params, len(texts)), _adapter_list(adapter, len(texts))
        # The template writes special tokens itself.
        ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        requests = [self._make(i, p, adapter=a) for i, p, a in zip(ids, params, adapters, strict=True)]
        return self._run(list(zip(requests, texts, strict=True)), use_tqdm)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling: Pooling = "last",
        use_tqdm: bool = True,
        *,
        adapter: Adapters = None,
    ) -> list[RequestOutput]:
        """Embed prompts, in the forms that `generate` takes: each output's `embedding`, in the prompts' order.

        pooling: "last" takes the hidden state of the prompt's last token, "mean" the mean of all of them; both after
        the final norm, scaled to length 1 (L2). adapter: as for `generate`. Raises InvalidRequestError, before anything
        runs.
        """
        params, items = SamplingParams(), _prompt_list(prompts)
        adapters = _adapter_list(adapter, len(items))
        requests = [self._request(item, params, pooling, a) for item, a in zip(items, adapters, strict=True)]
        return self._run(requests, use_tqdm)

    def load_lora_adapter(self, name: str, path: str) -> None:
        """Load an adapter from its folder, in PEFT's form, or of a name on the hub; `generate` and the others take its
        name from then on.

        Raises InvalidRequestError, also without the option enable_lora, and ModelError for a folder that cannot be
        served.
        """
        folder = os.path.abspath(local_adapter(path, self.config.download_dir))
        self.engine.add_adapter(self.engine.prepare_adapter(name, folder))

    def unload_lora_adapter(self, name: str) -> None:
        """Forget an adapter. Raises InvalidRequestError if there is none of this name."""
        self.engine.remove_adapter(name)

    def list_lora_adapters(self) -> list[str]:
        """The names of the loaded adapters."""
        return self.engine.adapters

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json says, unless the option generation_config is none."""
        return SamplingParams(**self.engine.info.sampling_defaults)

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

    def _request(
        self, prompt: Prompt, params: SamplingParams, pooling: Pooling | None = None, adapter: str = ""
    ) -> tuple[GenerationRequest, str | None]:
        fields = _read_prompt(prompt)
        ids = fields.prompt_token_ids
        if ids is None:
            ids = self._need_tokenizer("prompt", "prompt must be token ids").encode(fields.prompt or "")
        return self._make(ids, params, cache_salt=fields.cache_salt, pooling=pooling, adapter=adapter), fields.prompt

    def _need_tokenizer(self, param: str, reason: str) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequestError(f"{reason}; the engine was made with skip_tokenizer_init", param)
        return self.tokenizer

    def _params_list(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            return [params] * count
        if len(params) != count:
            raise InvalidRequestError(
                f"sampling_params has {len(params)} entries for {count} prompts; give one, or one each",
                "sampling_params",
            )
        return list(params)

    def _make(self, ids: list[int], params: SamplingParams, **fields: Any) -> GenerationRequest:
        number = next(self._ids)
        request = GenerationRequest(
            request_id=str(number),
            prompt_token_ids=ids,
            params=params,
            bad_token_ids=self._bad_token_ids(params.bad_words),
            arrival_time=time.time(),
            **fields,
        )
        return request.numbered(number + 1, self.config.seed)

    def _bad_token_ids(self, words: list[str]) -> list[list[int]]:
        if words and self._bad_words[0] != words:  # usually all prompts of a call have the same
            tokenizer = self._need_tokenizer("bad_words", "bad_words need a tokenizer")
            self._bad_words = list(words), bad_token_ids(words, tokenizer, self.engine.info.vocab_size)
        return self._bad_words[1] if words else []

    def _run(self, requests: Sequence[tuple[GenerationRequest, str | None]], use_tqdm: bool) -> list[RequestOutput]:
        """Run requests to their end. An exception, Ctrl-C included, aborts what is left of them."""
        core = self.engine
        processor = OutputProcessor(self.tokenizer)
        # The text of requests with stop strings decides when they end.
        buffer = DeltaBuffer({request.request_id for request, _text in requests if request.params.stop})
        totals = {
            request.request_id: RequestOutput(request.request_id, text, request.prompt_token_ids, [], False)
            for request, text in requests
        }
        compiled, started = threading.Event(), False
        core.on_compiled = compiled.set
        try:
            # Grammars first, and all of them: a bad one stops the call before anything runs.
            for request, text in sorted(requests, key=lambda each: each[0].params.structured_outputs is None):
                core.add(request)
                processor.add(request, text)
            while core.is_compiling:
                compiled.wait()
                compiled.clear()
            with tqdm(total=len(requests), desc="Generating", unit="req", disable=not use_tqdm) as bar:
                while core.has_work():
                    with _uninterrupted():
                        deltas = core.step()
                        if deltas and deltas[0].bad_param is not None and not started:
                            raise InvalidRequestError(str(deltas[0].stop_reason), deltas[0].bad_param)
                        started = True
                        outputs, to_abort = processor.process(buffer.merge(deltas))
                        core.abort(to_abort)
                    for output in outputs:
                        accumulate(totals[output.request_id], output)
                        bar.update(output.finished)
        except BaseException:
            core.abort(map(Abort, totals))
            raise
        if missing := [request_id for request_id, total in totals.items() if not total.finished]:
            raise RuntimeError(f"requests {missing} ended without an answer")
        return list(totals.values())


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C waits for the end of the block; the second one does not.

    In the middle of a step a plan or its result would be lost for good.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    came = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal came
        if came:
            before(number, frame)
        came = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        before(signal.SIGINT, None)


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


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Tell one prompt (a string, a dict, a non-empty list of ids) from a list of prompts."""
    if isinstance(prompts, str | dict):
        return [prompts]
    items = list(prompts)
    is_one = items and all(isinstance(item, int) for item in items)
    return cast(list[Prompt], [items] if is_one else items)


def _adapter_list(adapter: Adapters, count: int) -> list[str]:
    """The adapter's name of each of so many prompts, empty for none."""
    if adapter is None or isinstance(adapter, str):
        return [adapter or ""] * count
    if len(adapter) != count:
        message = f"adapter has {len(adapter)} entries for {count} prompts; give one, or one each"
        raise InvalidRequestError(message, "adapter")
    return [each or "" for each in adapter]


def _read_prompt(prompt: Prompt) -> PromptFields:
    fields: Any = prompt
    if isinstance(prompt, str):
        fields = {"prompt": str(prompt)}
    elif isinstance(prompt, list | tuple):
        fields = {"prompt_token_ids": prompt}
    try:
        read = msgspec.convert(fields, PromptFields)
        if (read.prompt is None) == (read.prompt_token_ids is None):
            raise msgspec.ValidationError("Expected exactly one of `prompt` and `prompt_token_ids`")
    except msgspec.ValidationError as error:
        form = "a prompt is a string, a list of token ids, or a dict of prompt or prompt_token_ids, perhaps cache_salt"
        raise InvalidRequestError(f"{form}. {error}", "prompt") from None
    return read
