"""Bodies to engine requests."""

import msgspec
import pytest
from support.jobs import INFO, chat, completion

from rayllm.api.sampling_params import SamplingParams
from rayllm.errors import InvalidRequestError
from rayllm.serve.http.errors import ContextLengthError


def test_completion_defaults():
    job = completion()[1]
    (request,) = job.requests
    assert request.request_id == "cmpl-1-0"
    assert request.prompt_token_ids == [1, 104, 105]
    assert (request.params.max_tokens, request.params.temperature, request.params.n) == (16, 1.0, 1)
    assert request.params.logprobs is None


def test_completion_default_tokens_fit_into_the_context():
    job = completion(prompt=[5] * 30)[1]
    assert job.requests[0].params.max_tokens == 10


def test_defaults_of_the_model_fill_what_the_body_leaves_out():
    defaults = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1, "max_tokens": 25}
    info = msgspec.structs.replace(INFO, sampling_defaults=defaults)
    for make in (completion, chat):
        params = make(info=info)[1].requests[0].params
        assert params == SamplingParams(**defaults)
        given = {"temperature": 0, "top_p": 1, "top_k": 0, "repetition_penalty": 1.0, "max_tokens": 3}
        assert make(info=info, **given)[1].requests[0].params == SamplingParams(**given)
        assert make(info=info, top_k=None, max_completion_tokens=4)[1].requests[0].params.top_k == 20, "null is absent"
        beams = make(info=info, use_beam_search=True, n=2)[1].requests[0].params
        assert beams == SamplingParams(use_beam_search=True, n=2, max_tokens=25), "the others are of sampling"
    long = completion(info=info, prompt=[5] * 30)[1].requests[0]
    assert long.params.max_tokens == 10, "what the context has room for"


def test_every_sampling_field_arrives():
    fields = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "min_tokens": 2,
        "stop": ["a", "b"],
        "stop_token_ids": [3],
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "seed": 9,
        "max_tokens": 5,
        "prompt_logprobs": 2,
    }
    job = completion(**fields, logprobs=3, logit_bias={"5": -1}, cache_salt="s", priority=4)[1]
    request = job.requests[0]
    for name, value in fields.items():
        assert getattr(request.params, name) == value
    assert (request.params.logprobs, request.params.logit_bias) == (3, {5: -1})
    assert (request.cache_salt, request.priority) == ("s", 4)


def test_chat_takes_the_rest_of_the_context_and_the_template():
    job = chat()[1]
    assert job.prompts == ["u:hi;a:"]
    assert job.requests[0].prompt_token_ids == [ord(c) for c in "u:hi;a:"]  # the template adds special tokens itself
    assert job.requests[0].params.max_tokens is None
    assert chat(add_special_tokens=True)[1].requests[0].prompt_token_ids[0] == 1
    assert chat(max_completion_tokens=3)[1].requests[0].params.max_tokens == 3
    assert chat(logprobs=True)[1].requests[0].params.logprobs == 0
    assert chat(logprobs=True, top_logprobs=4)[1].requests[0].params.logprobs == 4
    assert chat(logprobs=False)[1].requests[0].params.logprobs is None


def test_echo_asks_for_prompt_logprobs():
    job = completion(prompt=[[104, 105]], echo=True, logprobs=1, max_tokens=0)[1]
    assert job.prompts == ["hi"]
    assert job.discard_output
    assert (job.requests[0].params.prompt_logprobs, job.requests[0].params.max_tokens) == (1, 1)


@pytest.mark.parametrize(
    ("make", "fields", "param", "text"),
    [
        (completion, {"prompt": [5] * 30, "max_tokens": 11}, "prompt", "30 tokens and max_tokens asks for 11 more"),
        (completion, {"prompt": [5] * 41}, "prompt", "context is 40"),
        (completion, {"prompt": [5] * 40}, "prompt", "context is 40"),
        (chat, {"max_tokens": 40}, "messages", "context is 40"),
        (chat, {"messages": [{"role": "user", "content": "x" * 99}]}, "messages", "context is 40"),
    ],
)
def test_more_than_the_context_names_the_limit(make, fields, param, text):
    with pytest.raises(ContextLengthError) as caught:
        make(**fields)
    assert caught.value.param == param
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("make", "fields", "param"),
    [
        (completion, {"prompt": "", "add_special_tokens": False}, "prompt"),
        (completion, {"prompt": [128]}, "prompt"),
        (completion, {"prompt": [-1]}, "prompt"),
        (completion, {"prompt": [10**30]}, "prompt"),
        (completion, {"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        (completion, {"temperature": 0, "n": 2}, "n"),
        (completion, {"temperature": -1}, "temperature"),
        (completion, {"top_p": 0}, "top_p"),
        (completion, {"stop": [""]}, "stop"),
        (completion, {"stop": ["x"] * 65}, "stop"),
        (completion, {"stop_token_ids": [200]}, "stop_token_ids"),
        (completion, {"logit_bias": {"200": 1}}, "logit_bias"),
        (completion, {"seed": 2**63}, "seed"),
        (completion, {"tokenizer": None}, "prompt"),
    ],
)
def test_requests_that_cannot_be_served(make, fields, param):
    with pytest.raises(InvalidRequestError) as caught:
        make(**fields)
    assert caught.value.param == param


def test_without_a_tokenizer_only_ids_work():
    assert completion(tokenizer=None, prompt=[5, 6], echo=True)[1].requests[0].prompt_token_ids == [5, 6]
    with pytest.raises(InvalidRequestError, match="without a tokenizer"):
        chat(tokenizer=None)


@pytest.mark.parametrize("make", [completion, chat])
def test_beams_reach_the_engine(make):
    job = make(use_beam_search=True, best_of=4, n=3, length_penalty=0.5, early_stopping="never")[1]
    params = job.requests[0].params
    assert (params.use_beam_search, params.width, params.n) == (True, 4, 3)
    assert (params.length_penalty, params.early_stopping) == (0.5, "never")


def test_what_beams_cannot_have_is_refused_by_its_own_name():
    for fields, name in (
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"temperature": 0.7}, "temperature"),
        ({"stop": "x"}, "stop"),
        ({"best_of": 1}, "best_of"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            completion(**{"use_beam_search": True, "best_of": 2} | fields)
        assert caught.value.param == name
        assert name in str(caught.value)
