"""Request bodies: what is honoured, what is refused and with which field named."""

import pytest
from support.app import Api, error_of

from rayllm.serve.http.protocol import MAX_CHOICES, ChatBody, CompletionBody

USER = [{"role": "user", "content": "hi"}]
API = Api()


def completion(**fields):
    return CompletionBody.model_validate({"prompt": "x"} | fields)


def chat(**fields):
    return ChatBody.model_validate({"messages": USER} | fields)


def refusal(make, **fields):
    """(message, param) of the app's answer to a body that it refuses."""
    path = "/v1/completions" if make is completion else "/v1/chat/completions"
    error = error_of(API.post(path, json=({"prompt": "x"} if make is completion else {"messages": USER}) | fields), 400)
    return error["message"], error["param"]


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1, 2], [3]], [[1, 2], [3]]), ("", [""])],
)
def test_prompt_forms(prompt, prompts):
    assert completion(prompt=prompt).prompt == prompts


@pytest.mark.parametrize("prompt", [None, 3, {}, [1, "a"], [True], [[1], "a"], [["a"]], [1.5], [], [[]], [[1], []]])
def test_bad_prompts_name_the_field(prompt):
    message, param = refusal(completion, prompt=prompt)
    assert param == "prompt"
    assert "prompt" in message


def test_missing_prompt_and_messages():
    for path, field in (("/v1/completions", "prompt"), ("/v1/chat/completions", "messages")):
        error = error_of(API.post(path, json={}), 400)
        assert (error["message"], error["param"]) == (f"{field} is required", field)


@pytest.mark.parametrize("make", [completion, chat])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("response_format", {"type": "xml"}),
        ("structured_outputs", {"xml": "a"}),
        ("guided_json", 3),
        ("audio", {"voice": "x"}),
        ("temperature", "1"),
        ("temperature", True),
        ("n", 1.5),
        ("n", 0),
        ("n", 10**9),
        ("max_tokens", "many"),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_completion_tokens", 2**31),
        ("top_k", "x"),
        ("seed", 1.5),
        ("stop", 3),
        ("early_stopping", "soon"),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("logit_bias", {"1": "x"}),
        ("logit_bias", {"x": 1}),
        ("stop_token_ids", ["a"]),
        ("priority", 2**40),
        ("cache_salt", 5),
        ("user", 5),
        ("service_tier", "gold"),
    ],
)
def test_refused_fields_are_named(make, field, value):
    message, param = refusal(make, **{field: value})
    assert param == field
    assert field in message


def test_what_no_model_does_is_refused_by_name():
    for field, value in (("audio", {"voice": "x"}), ("web_search_options", {}), ("chat_template", "{{ 1 }}")):
        assert refusal(chat, **{field: value}) == (f"{field}: is not supported", field)
        assert getattr(chat(**{field: None}), field) is None


def test_best_of_and_beams():
    assert completion(best_of=3, n=2).num_sampled == 3
    message, param = refusal(completion, best_of=128, prompt=["a"] * 9)
    assert (param, "prompts x best_of is 1152" in message) == ("best_of", True)
    for make in (completion, chat):
        assert refusal(make, best_of=2, stream=True) == (
            "best_of greater than n is not available with stream: true",
            "best_of",
        )
        for fields in ({"best_of": 2}, {"n": 2}):
            message, param = refusal(make, use_beam_search=True, stream=True, **fields)
            assert (message, param) == ("use_beam_search is not available with stream: true", "use_beam_search")
        assert make(best_of=2, n=2, stream=True).num_sampled == 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", None),
        ("tools", []),
        ("tool_choice", "none"),
        ("response_format", {"type": "text"}),
        ("suffix", None),
        ("functions", None),
        ("user", "me"),
        ("store", False),
        ("metadata", {"a": "b"}),
        ("modalities", ["text"]),
        ("temperature", None),
        ("stop", None),
        ("service_tier", "auto"),
    ],
)
def test_values_that_ask_for_nothing_are_accepted(field, value):
    chat(**{field: value})
    completion(**{field: value})


def test_chat_only_and_completion_only_fields():
    assert chat(parallel_tool_calls=True).parallel_tool_calls
    assert refusal(completion, parallel_tool_calls=True, strict_fields=True)[1] == "parallel_tool_calls"
    assert refusal(chat, echo=True, strict_fields=True)[1] == "echo"


def test_field_combinations():
    assert refusal(chat, top_logprobs=2)[1] == "top_logprobs"
    assert refusal(chat, top_logprobs=21, logprobs=True)[1] == "top_logprobs"
    assert refusal(completion, logprobs=21)[1] == "logprobs"
    assert refusal(completion, prompt_logprobs=1, stream=True)[1] == "prompt_logprobs"
    assert refusal(completion, max_tokens=1, max_completion_tokens=2)[1] == "max_completion_tokens"
    assert completion(max_completion_tokens=7).token_limit == 7
    assert completion(max_tokens=7, max_completion_tokens=7).token_limit == 7


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_the_least_token_limit_is_told_alike(name):
    for value in (0, -1, -(10**20)):
        assert refusal(chat, **{name: value}) == (f"{name} must be at least 1, not {value}", name)
        message = f"{name} must be at least 1, or 0 with echo: true, not {value}"
        assert refusal(completion, **{name: value}) == (message, name)
    assert refusal(completion, echo=True, **{name: -1}) == (f"{name} must be at least 0, not -1", name)
    assert completion(echo=True, **{name: 0}).token_limit == 0


def test_no_stop_string_is_empty():
    for stop in ("", [""], ["a", ""]):
        message, param = refusal(completion, stop=stop)
        assert (message.startswith("stop must not hold an empty string"), param) == (True, "stop")
    for stop in (None, []):
        assert not completion(stop=stop).stop


def test_product_of_prompts_and_n_is_capped():
    completion(prompt=["a"] * 8, n=128)
    message, param = refusal(completion, prompt=["a"] * 9, n=128)
    assert param == "n"
    assert str(MAX_CHOICES) in message
    assert refusal(completion, prompt=["a"] * (MAX_CHOICES + 1))[1] == "prompt"


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"3", b'{"prompt": "\\ud800"}', b'{"prompt": "\xff"}', b"[" * 100_000, b'{"prompt": nope}'],
)
def test_bodies_that_are_not_json_objects(body):
    assert "request body" in error_of(API.post("/v1/completions", content=body), 400)["message"]


def test_a_body_is_json_whatever_its_content_type():
    for content_type in ("application/x-www-form-urlencoded", "text/plain", "multipart/form-data", "application/json"):
        answer = API.post("/v1/completions", content=b'{"prompt": "x"}', headers={"content-type": content_type})
        assert answer.status_code == 200


def test_a_byte_order_mark_is_left_out():
    assert API.post("/v1/completions", content=b'\xef\xbb\xbf{"prompt": "x"}').status_code == 200


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([], "must not be empty"),
        ("hi", "input should be an array"),
        (["hi"], "messages.0: input should be an object"),
        ([{"content": "hi"}], "role is required"),
        ([{"role": "robot", "content": "hi"}], "role"),
        ([{"role": "assistant", "function_call": {"arguments": "{}"}}], "messages.0.function_call.name is required"),
        ([{"role": "assistant", "audio": {"id": "a"}}], "messages.0.audio: is not supported"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            "'image_url' is not supported: models are served text-",
        ),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "'input_audio' is not supported: models are served"),
        ([{"role": "user", "content": [{"type": "file"}]}], "'file' is not supported: models are served text-only"),
        ([{"role": "user", "content": [{"type": "text", "text": 3}]}], "string"),
        ([{"role": "user", "content": 3}], "content: must be a string or a list of text parts"),
    ],
)
def test_bad_messages(messages, text):
    message, param = refusal(chat, messages=messages)
    assert param == "messages"
    assert text in message


def test_messages_for_the_template():
    body = chat(
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "name": "ann", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "refusal": None, "tool_calls": None, "audio": None},
            {"role": "user"},
        ]
    )
    assert [m.for_template() for m in body.messages] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb", "name": "ann"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": ""},
    ]
