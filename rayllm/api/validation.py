"""Checks of a request against an engine's limits. Fronts call this before they send, the engine before it queues."""

from __future__ import annotations

from rayllm.api.sampling_params import MAX_BAD_WORDS, SamplingParams
from rayllm.api.types import POOLINGS, EngineInfo, GenerationRequest
from rayllm.errors import InvalidRequestError


def validate_request(request: GenerationRequest, info: EngineInfo) -> None:
    """Raise InvalidRequestError, naming field and limit, for a request that the engine can never serve."""
    prompt, params = request.prompt_token_ids, request.params
    if request.pooling is not None:
        _check_pooling(request)
    if not prompt:
        raise InvalidRequestError("prompt must not be empty", "prompt")
    room = 0 if request.pooling else 1
    if len(prompt) + room > info.max_model_len:
        raise InvalidRequestError(
            f"prompt has {len(prompt)} tokens; {'with at least one output token ' if room else ''}it must fit into the "
            f"model's context of {info.max_model_len} tokens",
            "prompt",
        )
    if params.structured_outputs is not None and not info.eos_token_ids:
        raise InvalidRequestError(
            "structured_outputs: this model has no end-of-sequence token, by which its text could end",
            "structured_outputs",
        )
    if request.emitted is not None:
        _check_emitted(request, info)
    if params.use_beam_search:
        _check_beams(params, info)
    if params.bad_words and not request.bad_token_ids:
        raise InvalidRequestError("bad_words: no token of this model can write any of them", "bad_words")
    if len(request.bad_token_ids) > 2 * MAX_BAD_WORDS or not all(request.bad_token_ids):
        raise InvalidRequestError("bad_words have no tokens, or too many forms", "bad_words")
    for name, ids in (
        ("prompt", prompt),
        ("stop_token_ids", params.stop_token_ids),
        ("logit_bias", params.logit_bias),
        ("allowed_token_ids", params.allowed_token_ids),
        ("bad_words", [token for sequence in request.bad_token_ids for token in sequence]),
    ):
        worst = 0 if not ids else max(ids) if min(ids) >= 0 else min(ids)
        if not 0 <= worst < info.vocab_size:
            message = f"{name} has token id {worst}; ids of this model are 0 to {info.vocab_size - 1}"
            raise InvalidRequestError(message, name)


def _check_emitted(request: GenerationRequest, info: EngineInfo) -> None:
    """What is to go on has not ended yet. A front that keeps books makes it so."""
    params, emitted = request.params, request.emitted or {}
    room = min(params.max_tokens or info.max_model_len, info.max_model_len - len(request.prompt_token_ids))
    if not emitted or params.use_beam_search or request.pooling or not all(0 <= i < params.width for i in emitted):
        raise InvalidRequestError("emitted must be of completions that the request has, and not of beams", "emitted")
    if max(map(len, emitted.values())) >= room:
        raise InvalidRequestError(f"emitted: a completion has {room} tokens or more, as many as it may have", "emitted")
    if any(not 0 <= token < info.vocab_size for tokens in emitted.values() for token in tokens):
        raise InvalidRequestError(f"emitted: ids of this model are 0 to {info.vocab_size - 1}", "emitted")


def _check_beams(params: SamplingParams, info: EngineInfo) -> None:
    """Beams need rows, and the first of them enough other beginnings."""
    ending = set(params.stop_token_ids).union(() if params.ignore_eos else info.eos_token_ids)
    limit = min(info.max_num_seqs, info.vocab_size - len(ending))
    if params.width > limit:
        name = "n" if params.best_of is None else "best_of"
        reason = "sequences run at once" if limit == info.max_num_seqs else "tokens do not end a sequence"
        raise InvalidRequestError(
            f"{name} is the number of beams with use_beam_search: it must be at most {limit}, as so many {reason} on "
            f"this engine, not {params.width}",
            name,
        )


def _check_pooling(request: GenerationRequest) -> None:
    """An embedding has no tokens to choose, so parameters that choose some would be ignored."""
    if request.pooling not in POOLINGS:
        raise InvalidRequestError(f"pooling must be {' or '.join(POOLINGS)}, not {request.pooling!r}", "pooling")
    defaults = SamplingParams()
    for name in SamplingParams.__struct_fields__:
        if getattr(request.params, name) != getattr(defaults, name):
            raise InvalidRequestError(f"{name} cannot be combined with pooling, which generates nothing", name)
