"""Sampling parameters and structured outputs: what is refused where they are made, with which words and field."""

from __future__ import annotations

import math

import msgspec
import pytest

from rayllm.api.sampling_params import (
    MAX_CHOICES,
    MAX_STOP_CHARS,
    MAX_STOPS,
    MAX_STRUCTURE_BYTES,
    SamplingParams,
    StructuredOutputs,
)
from rayllm.errors import InvalidRequestError

BAD_VALUES = [
    ("n", 0, "n must be at least 1 and at most 128, not 0"),
    ("n", 1.0, "n must be an integer, not 1.0"),
    ("n", None, "n must be an integer, not None"),
    ("n", True, "n must be an integer, not True"),
    ("best_of", 129, "best_of must be at least 1 and at most 128, not 129"),
    ("temperature", math.nan, "temperature must be a number, not nan"),
    ("temperature", "1", "temperature must be a number, not '1'"),
    ("temperature", 10**400, "temperature must be at least 0 and at most 100, not 1000"),
    ("top_p", 0, "top_p must be greater than 0 and at most 1, not 0"),
    ("repetition_penalty", 0.0, "repetition_penalty must be greater than 0 and at most 100, not 0.0"),
    ("presence_penalty", -2.1, "presence_penalty must be at least -2 and at most 2, not -2.1"),
    ("max_tokens", 0, "max_tokens must be at least 1, not 0"),
    ("seed", 2**63, f"seed must be at least 0, not {2**63}"),
    ("ignore_eos", 1, "ignore_eos must be true or false, not 1"),
    ("stop", ["x"] * (MAX_STOPS + 1), f"stop takes at most {MAX_STOPS} entries, not {MAX_STOPS + 1}"),
    ("stop_token_ids", [-1], "stop_token_ids must be a list of token ids"),
    ("logit_bias", [1], "logit_bias must map token ids to numbers"),
    ("logit_bias", {-1: 0.0}, "logit_bias keys must be token ids, not -1"),
    ("logit_bias", {1: 100.5}, "logit_bias must be at least -100 and at most 100, not 100.5"),
    ("logit_bias", dict.fromkeys(range(1025), 0.0), "logit_bias takes at most 1024 entries, not 1025"),
]


@pytest.mark.parametrize(("name", "value", "words"), BAD_VALUES)
def test_bad_values_are_refused_by_name_and_limit(name, value, words):
    with pytest.raises(InvalidRequestError, match=words) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


def test_values_at_their_limits_and_none_where_it_has_a_meaning():
    none = dict.fromkeys(("best_of", "max_tokens", "logprobs", "prompt_logprobs", "seed", "stop", "stop_token_ids"))
    params = SamplingParams(n=128, top_p=1, top_k=-1, repetition_penalty=100, presence_penalty=-2, min_p=1, **none)
    assert (params.stop, params.stop_token_ids, params.width) == ([], [], 128)
    assert SamplingParams(stop="a").stop == ["a"]


def test_the_limit_of_stop_strings_is_inclusive():
    SamplingParams(stop=["x" * 10_000, "y" * (MAX_STOP_CHARS - 10_000)])
    with pytest.raises(InvalidRequestError, match="16384 characters in all, not 16385") as caught:
        SamplingParams(stop=["x" * 10_000, "y" * (MAX_STOP_CHARS - 9_999)])
    assert caught.value.param == "stop"


BAD_STRUCTURES = [
    ({}, "exactly one"),
    ({"json": "{}", "regex": "a"}, "found json, regex"),
    ({"json": {"type": "object"}}, "must be text"),
    ({"regex": ""}, "must be text"),
    ({"choice": []}, "at least one"),
    ({"choice": "yes"}, "list of strings"),
    ({"choice": ["a", ""]}, "non-empty"),
    ({"choice": ["a"] * (MAX_CHOICES + 1)}, f"at most {MAX_CHOICES} strings, not {MAX_CHOICES + 1}"),
    ({"regex": "ü" * (MAX_STRUCTURE_BYTES // 2 + 1)}, f"at most {MAX_STRUCTURE_BYTES} bytes"),
    ({"choice": ["x" * 1000] * 100}, f"at most {MAX_STRUCTURE_BYTES} bytes, not 100000"),
    ({"json_object": 1}, "true or false"),
    ({"grammar": "\ud800"}, "surrogates"),
]


@pytest.mark.parametrize(("fields", "reason"), BAD_STRUCTURES)
def test_bad_structures_are_refused_where_they_are_made(fields, reason):
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        StructuredOutputs(**fields)
    assert caught.value.param == "structured_outputs"


def test_parameters_that_contradict_a_structure():
    grammar = StructuredOutputs(choice=["a"])
    for name, value in (("ignore_eos", True), ("min_tokens", 3)):
        with pytest.raises(InvalidRequestError, match="cannot be combined with structured_outputs") as caught:
            SamplingParams(structured_outputs=grammar, **{name: value})
        assert caught.value.param == name
    with pytest.raises(InvalidRequestError, match="must be a StructuredOutputs"):
        SamplingParams(structured_outputs={"choice": ["a"]})
    params = SamplingParams(structured_outputs=grammar)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
