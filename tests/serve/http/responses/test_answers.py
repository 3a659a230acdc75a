"""The Response object and the events of its stream, held to the openai client's own types."""

from __future__ import annotations

import json

import pytest
from support.app import error_of
from support.chat_templates import HERMES, PLAIN, THINKER
from support.responses import CALL, WEATHER, Conversation, same, valid

from rayllm.errors import EngineDeadError, InvalidRequestError

# name -> (script, template, fields): what an answer can be made of.
KINDS = {
    "text": ("Hello there", PLAIN, {}),
    "nothing": ("", PLAIN, {}),
    "reasoning": ("hm\n</think>\nSunny.", THINKER, {"reasoning": {"effort": None, "summary": "auto"}}),
    "calls": (f"I look.\n{CALL}\n{CALL.replace('Rome', 'Oslo')}", None, {"tools": [WEATHER]}),
    "forced call": (
        '[{"name": "weather", "arguments": {"city": "Rome"}}]',
        None,
        {"tools": [WEATHER], "tool_choice": "required"},
    ),
    "one call": (
        '{"name": "weather", "arguments": {"city": "Rome"}}',
        None,
        {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "weather"}},
    ),
    "logprobs": ("Hello", PLAIN, {"top_logprobs": 1, "include": ["message.output_text.logprobs"]}),
    "schema": ("{}", PLAIN, {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}}}),
}


def conversation(kind, times=1, **options):
    script, source, _ = KINDS[kind]
    return Conversation(*[script] * times, **({} if source is None else {"source": source}), **options)


@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_answer_is_what_the_stream_ends_with(kind):
    app, fields = conversation(kind, times=2), KINDS[kind][2]
    whole = app.post(input="hi", **fields).json()
    valid(whole)
    events = app.events(**fields)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert [event["type"] for event in events].count("response.completed") == 1
    assert events[-1]["type"] == "response.completed"
    assert same(events[-1]["response"]) == same(whole)
    assert events[0]["response"]["status"] == events[1]["response"]["status"] == "in_progress"
    assert events[0]["response"]["output"] == [] and events[0]["response"]["usage"] is None


@pytest.mark.parametrize("kind", KINDS)
def test_deltas_add_up_to_the_items(kind):
    events = conversation(kind).events(**KINDS[kind][2])
    output = events[-1]["response"]["output"]
    for index, item in enumerate(output):
        own = [event for event in events if event.get("output_index") == index]
        assert own[0]["type"] == "response.output_item.added" and own[0]["item"]["id"] == item["id"]
        assert own[0]["item"]["status"] == "in_progress"
        assert own[-1]["type"] == "response.output_item.done" and own[-1]["item"] == item
        assert {event["item_id"] for event in own[1:-1]} == {item["id"]}
        text = "".join(event["delta"] for event in own if "delta" in event)
        (done,) = [event for event in own if event["type"].endswith(("text.done", "arguments.done"))]
        if item["type"] == "function_call":
            assert text == item["arguments"] == done["arguments"]
            continue
        (part,) = item["content"]
        assert text == part["text"] == done["text"]
        kinds = [event["type"] for event in own if "content_part" in event["type"]]
        assert kinds == ["response.content_part.added", "response.content_part.done"]
        if item["type"] == "message":
            tokens = [token for event in own if "delta" in event for token in event["logprobs"]]
            assert tokens == part["logprobs"] == done["logprobs"]
    assert [event.get("output_index", -1) for event in events[2:-1]] == sorted(
        event.get("output_index", -1) for event in events[2:-1]
    ), "one item ends before the next one begins"


@pytest.mark.parametrize("kind", KINDS)
def test_the_clients_stream_helper_gets_the_same(kind):
    app, fields = conversation(kind, times=2), KINDS[kind][2]
    fields = {name: value for name, value in fields.items() if name != "text"}  # the helper wants a type there
    whole, final = app.create(**fields), app.final(**fields)
    assert final.output_text == whole.output_text
    assert [item.type for item in final.output] == [item.type for item in whole.output]
    assert final.usage == whole.usage


def test_what_the_items_are():
    output = conversation("calls").create(**KINDS["calls"][2]).output
    assert [item.type for item in output] == ["message", "function_call", "function_call"]
    assert output[0].content[0].text.strip() == "I look."
    assert [(call.name, call.arguments) for call in output[1:]] == [
        ("weather", '{"city": "Rome"}'),
        ("weather", '{"city": "Oslo"}'),
    ]
    assert len({call.call_id for call in output[1:]}) == 2
    thought, said = conversation("reasoning").create().output
    assert (thought.content[0].text, thought.summary, said.content[0].text) == ("hm", [], "Sunny.")
    (empty,) = conversation("nothing").create().output
    assert empty.content[0].text == ""


def test_usage():
    usage = conversation("reasoning").create().usage
    assert usage.input_tokens + usage.output_tokens == usage.total_tokens
    assert usage.output_tokens_details.reasoning_tokens == len("hm\n</think>")
    assert usage.input_tokens_details.cached_tokens == 0


def test_logprobs():
    fields = KINDS["logprobs"][2]
    part = conversation("logprobs").create(**fields).output[0].content[0]
    assert "".join(token.token for token in part.logprobs).rstrip("\0") == "Hello"
    assert part.logprobs[0].top_logprobs[0].token == "H" and part.logprobs[0].bytes == [72]
    assert conversation("text").create().output[0].content[0].logprobs == []


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_cut(stream):
    app = conversation("text", finish="length")
    if stream:
        last = app.events()[-1]
        assert last["type"] == "response.incomplete"
        response = last["response"]
    else:
        response = app.post(input="hi").json()
    assert response["status"] == "incomplete" and response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"
    assert response["completed_at"] is None and response["usage"]["output_tokens"] > 0


def test_settings_are_said_again():
    schema = {"type": "object", "properties": {}}
    fields = {
        "instructions": "Be brief.",
        "temperature": 0.5,
        "top_p": 0.9,
        "max_output_tokens": 50,
        "max_tool_calls": 3,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "tools": [WEATHER],
        "tool_choice": {"type": "function", "name": "weather"},
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "p",
        "truncation": "auto",
        "store": False,
    }
    response = conversation("one call").post(input="hi", **fields).json()
    valid(response)
    assert {name: response[name] for name in fields} == fields
    response = (
        conversation("schema")
        .post(input="hi", text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}})
        .json()
    )
    assert response["text"]["format"]["schema"] == schema and response["text"]["format"]["strict"]
    response = conversation("text").post(input="hi").json()
    assert (response["tool_choice"], response["tools"], response["truncation"]) == ("auto", [], "disabled")
    assert (response["parallel_tool_calls"], response["store"], response["background"]) == (True, True, False)
    assert response["text"]["format"] == {"type": "text"} and response["temperature"] == 1.0


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_before_the_first_token_is_a_status(stream):
    app = conversation("text", fails={0: EngineDeadError("it is gone")})
    assert error_of(app.post(input="hi", stream=stream), 503)["code"] == "engine_unavailable"
    app = conversation("text", fails={0: InvalidRequestError("structured_outputs is bad", "structured_outputs")})
    answer = app.post(input="hi", stream=stream, text={"format": {"type": "json_object"}})
    assert error_of(answer, 400)["param"] == "text"


def test_an_error_in_mid_stream_is_an_event():
    events = conversation("text", fails={2: EngineDeadError("it is gone")}).events()
    assert events[-1]["type"] == "response.failed"
    response = events[-1]["response"]
    assert response["status"] == "failed" and response["error"]["code"] == "server_error"
    assert "it is gone" in response["error"]["message"]
    assert [event["type"] for event in events].count("response.failed") == 1


def test_the_same_again_with_an_idempotency_key():
    app = Conversation("Hello", "Hello", source=PLAIN)
    answers = [
        app.request("POST", "/v1/responses", json={"input": "hi"}, headers={"idempotency-key": "a"}) for _ in "12"
    ]
    first, second = (answer.json() for answer in answers)
    assert first["id"] == second["id"] and first["output"] == second["output"]


WITH_LOGPROBS = {"top_logprobs": 0, "include": ["message.output_text.logprobs"]}


def tokens_of(part):
    return "".join(token.token for token in part.logprobs).rstrip("\0")


def test_log_probabilities_are_of_the_message_alone():
    thoughtful = Conversation("<think>ab cd</think>Hello", source=HERMES + "{# </think> #}", step=1)
    assert tokens_of(thoughtful.create(**WITH_LOGPROBS).output[-1].content[0]) == "Hello"
    thoughtful = Conversation("<think>ab cd</think>Hello", source=HERMES + "{# </think> #}", step=1)
    assert tokens_of(thoughtful.final(**WITH_LOGPROBS).output[-1].content[0]) == "Hello"
    part = Conversation("Hi. " + CALL, step=1).create(tools=[WEATHER], **WITH_LOGPROBS).output[0].content[0]
    assert tokens_of(part) == part.text


LARGE = {"type": "integer", "maximum": 2**64}
TOO_LARGE = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {"x": LARGE}}}


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"background": True}])
def test_integers_that_no_answer_can_say_again_are_refused(fields):
    answer = Conversation("Hello").post(model="org/fake", input="hi", tools=[TOO_LARGE], **fields)
    assert answer.status_code == 400
    assert Conversation("Hello").post(model="org/fake", input="hi", max_tool_calls=2**70).status_code == 400


def test_nothing_of_a_failed_response_goes_on():
    failing = Conversation("Hello world, all of you", fails={4: EngineDeadError("x")})
    answer = failing.post(model="org/fake", input="hi", stream=True)
    last = json.loads(answer.text.strip().split("\n")[-1][6:])
    assert [item["status"] for item in last["response"]["output"]] == ["incomplete"]


def test_request_id_is_not_taken_here():
    answer = Conversation("Hello").post(model="org/fake", input="hi", request_id="abc")
    assert "request_id" in answer.headers["x-rayllm-ignored"]
