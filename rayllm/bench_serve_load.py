"""The work of `rayllm bench serve`: its options, the requests it sends and the times at which they are due."""

from __future__ import annotations

import json
import math
import random
import secrets
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml
from pydantic import BaseModel, ConfigDict, Field

from rayllm.bench import custom_workload
from rayllm.config.options import make_config
from rayllm.errors import ConfigError

# Random text is made of these, one for a token of random ids; most tokenizers have each of them in one token.
_TEXT = """
the of and to in is that for it as was with be by on not he this are or his from at which but have an they you
were her all she there would their we him been has when who will more no if out so said what up its about into
than them can only other new some could time these two may then do first any my now such like our over man me
"""
_WORDS = _TEXT.split()


class ServeBenchOptions(BaseModel):
    """What to send where: every flag of the command.

    url: address of the server. model: its model; None takes the first that it lists. endpoint: which API to ask.
    rate: requests a second on average, at random times fixed in advance (a Poisson process). concurrency: instead of
    rate, requests in flight; the next one is sent when one ends. num_prompts: requests to send; None is 100, or all
    of a dataset. prompts: token ids or words, at random; None is ids for completions and text for chat.
    vocab_size: random token ids are below it. input_len: tokens (words of text) of a random prompt, "N" or a range
    "A:B". output_len: tokens to generate, "N" or a range "A:B". dataset: JSONL file of objects with prompt or messages,
    and max_tokens if not output_len; instead of random prompts. ignore_eos: go on after an end token; None is true but
    for datasets. temperature: of sampling. seed: of prompts and times; None takes a new one, so that no prompt is in
    the server's prefix cache. warmup: requests sent before, not measured. timeout: seconds a request may take.
    slo_ttft_ms: goodput counts requests whose first token comes within this time of when they were due.
    slo_itl_ms: goodput counts requests whose mean time between tokens is within this.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    url: str = "http://127.0.0.1:8000"
    model: str | None = None
    endpoint: Literal["completions", "chat"] = "completions"
    rate: float | None = Field(default=None, gt=0, le=1e6, allow_inf_nan=False)
    concurrency: int | None = Field(default=None, ge=1, le=65536)
    num_prompts: int | None = Field(default=None, ge=1, le=10_000_000)
    prompts: Literal["ids", "text"] | None = None
    vocab_size: int = Field(default=4096, ge=1)
    input_len: str = "512"
    output_len: str = "128"
    dataset: str | None = None
    ignore_eos: bool | None = None
    temperature: float = Field(default=0.6, ge=0, allow_inf_nan=False)
    seed: int | None = Field(default=None, ge=0)
    warmup: int = Field(default=4, ge=0, le=10_000)
    timeout: float = Field(default=600, gt=0, allow_inf_nan=False)
    slo_ttft_ms: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    slo_itl_ms: float | None = Field(default=None, gt=0, allow_inf_nan=False)

    @property
    def has_slo(self) -> bool:
        return self.slo_ttft_ms is not None or self.slo_itl_ms is not None


class Load(NamedTuple):
    """bodies: the requests, in the order in which they are sent. due: seconds from the start, None with a fixed
    concurrency. warmup: bodies sent before, which are not measured.
    """

    bodies: list[dict[str, Any]]
    due: list[float] | None
    warmup: list[dict[str, Any]]


def bench_options(given: dict[str, Any]) -> ServeBenchOptions:
    """The options of flags (None where not given) over those of the file "config", with a seed. Raises ConfigError."""
    flags = {name: value for name, value in given.items() if value is not None}
    path = flags.pop("config", None)
    options = make_config(ServeBenchOptions, (_read_config(path) if path is not None else {}) | flags)
    return options if options.seed is not None else options.model_copy(update={"seed": secrets.randbelow(2**31)})


def _read_config(path: str) -> dict[str, Any]:
    try:
        loaded = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"config file {path} cannot be read: {error}") from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"config file {path} must hold a mapping of options, not {type(loaded).__name__}")
    return loaded


def make_load(options: ServeBenchOptions, model: str) -> Load:
    """The same options, seed included, make the same load. Raises ConfigError for options that do not go together."""
    seed = options.seed
    assert seed is not None, "bench_options draws one"
    if (options.rate is None) == (options.concurrency is None):
        raise ConfigError("give exactly one of --rate and --concurrency")
    if options.prompts is not None and options.dataset is not None:
        raise ConfigError("give --prompts or --dataset, not both")
    if options.prompts == "ids" and options.endpoint == "chat":
        raise ConfigError("prompts of token ids are for --endpoint completions; chat takes text")
    if options.dataset is not None:
        bodies = _dataset_bodies(options, options.dataset, seed)
    else:
        bodies = _random_bodies(options, options.num_prompts or 100, seed)
    # Random, of a run that no seed has: warming up must not put what is measured into the server's prefix cache.
    warmup = _random_bodies(options, options.warmup, -1 - seed) if options.warmup else []
    common = _common_fields(options, model)
    bodies, warmup = ([common | body for body in part] for part in (bodies, warmup))
    return Load(bodies, None if options.rate is None else arrival_times(options.rate, len(bodies), seed), warmup)


def arrival_times(rate: float, count: int, seed: int) -> list[float]:
    """Seconds at which requests are due: a Poisson process of `rate` a second, the first one at 0."""
    rng = random.Random(f"arrivals {seed}")
    times = [0.0]
    for _ in range(count - 1):
        times.append(times[-1] - math.log(1 - rng.random()) / rate)
    return times


def _common_fields(options: ServeBenchOptions, model: str) -> dict[str, Any]:
    ignore_eos = options.dataset is None if options.ignore_eos is None else options.ignore_eos
    return {
        "model": model,
        "temperature": options.temperature,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        **({"ignore_eos": True} if ignore_eos else {}),
    }


def _random_bodies(options: ServeBenchOptions, count: int, run: int) -> list[dict[str, Any]]:
    batch = custom_workload(count, options.input_len, options.output_len).make(run)
    as_ids = options.endpoint == "completions" and options.prompts != "text"
    bodies = []
    for ids, max_tokens in zip(batch.prompts, batch.max_tokens, strict=True):
        prompt: Any
        if as_ids:
            prompt = [token % options.vocab_size for token in ids]
        else:
            prompt = " ".join(_WORDS[token % len(_WORDS)] for token in ids)
        bodies.append(_body(options, prompt) | {"max_tokens": max_tokens})
    return bodies


def _body(options: ServeBenchOptions, prompt: Any) -> dict[str, Any]:
    return {"prompt": prompt} if options.endpoint == "completions" else {"messages": [_user(prompt)]}


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _dataset_bodies(options: ServeBenchOptions, path: str, seed: int) -> list[dict[str, Any]]:
    """One body a line of the file, in its order. Raises ConfigError that names the line."""
    try:
        lines = [line for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"dataset {path} cannot be read: {reason}") from None
    count = len(lines) if options.num_prompts is None else options.num_prompts
    if not lines or count > len(lines):
        raise ConfigError(f"dataset {path} has {len(lines)} prompts, fewer than the {max(count, 1)} to send")
    # Lines without max_tokens get lengths as random prompts do.
    lengths = custom_workload(count, "1", options.output_len).make(seed).max_tokens
    bodies = []
    for number, (line, length) in enumerate(zip(lines[:count], lengths, strict=True), start=1):
        try:
            bodies.append(_dataset_body(options, json.loads(line), length))
        except ValueError as error:
            raise ConfigError(f"dataset {path}, prompt {number}: {error}") from None
    return bodies


def _dataset_body(options: ServeBenchOptions, entry: Any, length: int) -> dict[str, Any]:
    """Raises ValueError if the entry is not what the endpoint takes."""
    if not isinstance(entry, dict) or ("prompt" in entry) == ("messages" in entry):
        raise ValueError("must be an object with either prompt or messages")
    if unknown := set(entry) - {"prompt", "messages", "max_tokens"}:
        raise ValueError(f"unknown field {sorted(unknown)[0]!r}")
    max_tokens = entry.get("max_tokens", length)
    if type(max_tokens) is not int or max_tokens < 1:
        raise ValueError(f"max_tokens must be a number from 1, not {max_tokens!r}")
    if "messages" in entry:
        if options.endpoint != "chat":
            raise ValueError("messages are for --endpoint chat")
        return {"messages": entry["messages"], "max_tokens": max_tokens}
    if options.endpoint == "chat" and not isinstance(entry["prompt"], str):
        raise ValueError("prompt must be text for --endpoint chat")
    return _body(options, entry["prompt"]) | {"max_tokens": max_tokens}
