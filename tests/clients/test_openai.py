"""openai-python, 2.x and 3.x, against a live server."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import uuid
from typing import Literal

import pytest

openai = pytest.importorskip("openai", reason="openai is not installed")
pydantic = pytest.importorskip("pydantic", reason="pydantic is not installed")

MODEL = "tiny-pydoc"
USAGE = {"prompt_tokens", "completion_tokens", "total_tokens"}  # how much was cached may differ
QUESTION = [{"role": "user", "content": "What does len do?"}]
PLACE = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "travel", "description": "Go there.", "parameters": PLACE}},
    {"type": "function", "function": {"name": "rest", "parameters": {"type": "object", "properties": {}}}},
]


class Visit(pydantic.BaseModel):
    """A stay in a city."""

    city: Literal["Rome", "Oslo"]
    kind: Literal["short", "long"]
    guide: bool


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def test_models(client):
    (model,) = client.models.list()
    assert (model.id, model.object) == (MODEL, "model")
    assert client.models.retrieve(MODEL) == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")


def test_a_request_sent_again_has_the_same_answer(client):
    fields = {"model": MODEL, "prompt": "The for statement", "max_tokens": 16, "temperature": 1, "logprobs": 1}
    again = {"Idempotency-Key": uuid.uuid4().hex}
    with client.completions.create(**fields, stream=True, extra_headers=again) as broken:
        first = next(iter(broken))
    answers = [list(client.completions.create(**fields, stream=True, extra_headers=again))]
    answers.append(list(client.completions.create(**fields, stream=True, extra_headers=again)))
    one, two = ("".join(chunk.choices[0].text for chunk in chunks) for chunks in answers)
    assert one == two
    assert one.startswith(first.choices[0].text)
    assert {(chunk.id, chunk.created) for chunks in answers for chunk in chunks} == {(first.id, first.created)}
    with pytest.raises(openai.UnprocessableEntityError, match="another body"):
        client.completions.create(**fields, n=2, extra_headers=again)


def test_completion_whole_and_streamed(client):
    fields = {"model": MODEL, "prompt": "The for statement", "max_tokens": 16, "temperature": 0, "logprobs": 2}
    whole = client.completions.create(**fields)
    *chunks, last = client.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    assert whole.choices[0].text == "".join(chunk.choices[0].text for chunk in chunks) != ""
    assert whole.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "length"
    assert (last.choices, last.usage.model_dump(include=USAGE)) == ([], whole.usage.model_dump(include=USAGE))
    assert all(chunk.usage is None for chunk in chunks)
    assert whole.usage.completion_tokens == 16
    logprobs = whole.choices[0].logprobs
    assert "".join(logprobs.tokens) == whole.choices[0].text
    streamed = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs is not None]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert len(getattr(logprobs, name)) == 16
        assert [each for part in streamed for each in getattr(part, name)] == getattr(logprobs, name)


def test_chat_whole_and_streamed(client):
    fields = {
        "model": MODEL,
        "messages": QUESTION,
        "max_completion_tokens": 16,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = client.chat.completions.create(**fields)
    with client.chat.completions.stream(**fields, stream_options={"include_usage": True}) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    message = whole.choices[0].message
    assert (message.role, message.refusal, message.tool_calls) == ("assistant", None, None)
    assert message.content == "".join(deltas) == final.choices[0].message.content != ""
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason
    assert final.usage.model_dump(include=USAGE) == whole.usage.model_dump(include=USAGE)
    tokens = whole.choices[0].logprobs.content
    # The second prompt's beginning comes from the cache, so sums may round otherwise.
    for one, other in zip(final.choices[0].logprobs.content, tokens, strict=True):
        assert one.token == other.token
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
    assert len(tokens) == whole.usage.completion_tokens
    spoken = tokens[:-1] if whole.choices[0].finish_reason == "stop" else tokens  # the last one ended the answer
    assert b"".join(bytes(token.bytes) for token in spoken).decode() == message.content
    for token in tokens:
        assert len(token.top_logprobs) == 2
        assert token.logprob == token.top_logprobs[0].logprob <= 0


def test_several_choices_stop_and_seed(client):
    fields = {"model": MODEL, "prompt": ["One", "Two"], "n": 3, "max_tokens": 8, "seed": 5, "temperature": 1}
    first, again = (client.completions.create(**fields).choices for _ in range(2))
    assert [choice.index for choice in first] == list(range(6))
    assert [choice.text for choice in first] == [choice.text for choice in again]
    assert len({choice.text for choice in first}) > 1
    streamed = [""] * 6
    for chunk in client.completions.create(**fields, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == [choice.text for choice in first]
    text = client.completions.create(model=MODEL, prompt="A list is", max_tokens=24, temperature=0).choices[0].text
    stop = text[len(text) // 2 :][:3]
    cut = client.completions.create(
        model=MODEL, prompt="A list is", max_tokens=24, temperature=0, stop=["never there", stop]
    ).choices[0]
    assert (cut.text, cut.finish_reason) == (text[: text.index(stop)], "stop")


def test_enforced_tools_whole_streamed_and_answered(client):
    fields = {
        "model": MODEL,
        "messages": QUESTION,
        "tools": TOOLS,
        "max_tokens": 200,
        "seed": 1,
        "tool_choice": {"type": "function", "function": {"name": "travel"}},
    }
    whole = client.chat.completions.create(**fields).choices[0]
    with client.chat.completions.stream(**fields) as stream:
        final = stream.get_final_completion().choices[0]
    (call,), (streamed,) = whole.message.tool_calls, final.message.tool_calls
    assert (whole.finish_reason, final.finish_reason) == ("tool_calls", "tool_calls")
    assert (call.function.name, call.function.arguments) == ("travel", streamed.function.arguments)
    given = json.loads(call.function.arguments)
    assert given.keys() == {"city", "days"} and given["city"] in ("Rome", "Oslo") and 1 <= given["days"] <= 9
    # The next turn, with the client's own forms of the message: the object, and what dumping it gives.
    for message in (whole.message, whole.message.model_dump(), final.message.model_dump()):
        turn = message if isinstance(message, dict) else message.model_dump(exclude_unset=True)
        answer = {"role": "tool", "tool_call_id": turn["tool_calls"][0]["id"], "content": "done"}
        ended = client.chat.completions.create(
            model=MODEL,
            messages=[*QUESTION, turn, answer],
            tools=TOOLS,
            tool_choice="none",
            max_tokens=4,
            temperature=0,
        )
        assert ended.choices[0].message.content
    required = client.chat.completions.create(**fields | {"tool_choice": "required", "parallel_tool_calls": False})
    (call,) = required.choices[0].message.tool_calls
    assert call.function.name in ("travel", "rest")
    auto = client.chat.completions.create(**fields | {"tool_choice": "auto", "max_tokens": 8}).choices[0]
    # Of a call that was cut, nothing is in the content.
    assert auto.message.content or auto.message.tool_calls or auto.finish_reason == "length"


def test_parse(client):
    fields = {"model": MODEL, "messages": QUESTION, "max_tokens": 200, "temperature": 0}
    message = client.chat.completions.parse(**fields, response_format=Visit).choices[0].message
    assert isinstance(message.parsed, Visit)
    with client.chat.completions.stream(**fields, response_format=Visit) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == message.parsed
    tool = openai.pydantic_function_tool(Visit)
    choice = client.chat.completions.parse(**fields, tools=[tool], tool_choice="required").choices[0]
    assert choice.finish_reason == "tool_calls"
    assert all(isinstance(call.function.parsed_arguments, Visit) for call in choice.message.tool_calls)
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**fields | {"max_tokens": 2}, response_format=Visit)


def test_structured_output_extensions(client):
    def complete(**form):
        body = {"structured_outputs": form}
        return (
            client.completions.create(model=MODEL, prompt="x", max_tokens=200, temperature=0, extra_body=body)
            .choices[0]
            .text
        )

    assert complete(choice=["yes", "no"]) in ("yes", "no")
    year = complete(regex="(19|20)[0-9]{2}")
    assert year.isdigit() and len(year) == 4
    assert json.loads(complete(json=PLACE)).keys() == {"city", "days"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 10**6}, "prompt"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_tokens": openai.NOT_GIVEN, "extra_body": {"max_completion_tokens": -1}}, "max_completion_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"n": 10**9}, "n"),
        ({"logprobs": 21}, "logprobs"),
        ({"extra_body": {"colour": "red", "strict_fields": True}}, "colour"),
        ({"extra_body": {"structured_outputs": {"regex": "("}}}, "structured_outputs"),
        ({"stop": [""]}, "stop"),
    ],
    ids=str,
)
def test_a_bad_request_is_an_error_of_its_own_kind(client, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**{"model": MODEL, "prompt": "hi", "max_tokens": 2} | fields)
    error = caught.value
    assert (error.status_code, error.param, error.type) == (400, param, "invalid_request_error")
    assert error.request_id is not None
    assert param in error.message


def test_what_is_unknown_is_ignored_and_named(client):
    asked = {"colour": "red", "structured_outputs": {"choice": ["yes", "no"], "depth": 3}}
    raw = client.completions.with_raw_response.create(model=MODEL, prompt="hi", max_tokens=8, extra_body=asked)
    assert raw.parse().choices[0].text in ("yes", "no")
    assert raw.headers["x-rayllm-ignored"] == "colour, structured_outputs.depth"


def test_an_unknown_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="other", messages=QUESTION)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_a_full_server_is_a_rate_limit_that_the_client_waits_out(client):
    """One request fills the server; the next is refused with retry-after, and a client that retries gets its answer."""
    full = {"model": MODEL, "prompt": "def", "n": 128, "max_tokens": 60, "extra_body": {"ignore_eos": True}}
    stream = client.completions.create(**full, stream=True)
    next(stream)
    with pytest.raises(openai.RateLimitError) as caught:
        client.completions.create(**full)
    assert int(caught.value.response.headers["retry-after"]) >= 1
    draining = threading.Thread(target=lambda: list(stream))
    draining.start()
    answer = client.with_options(max_retries=60).completions.create(**full | {"max_tokens": 1})
    draining.join()
    assert len(answer.choices) == 128


def test_an_early_end_of_a_stream_leaves_the_client_usable(client):
    with client.completions.create(
        model=MODEL, prompt="def", max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        next(stream)
    assert client.completions.create(model=MODEL, prompt="hi", max_tokens=1).choices


def test_many_at_once(url):
    async def ask_all():
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=120) as client:

            async def ask(i):
                answer = await client.chat.completions.create(
                    model=MODEL, messages=[{"role": "user", "content": f"Item {i % 8}"}], max_tokens=8, temperature=0
                )
                return answer.choices[0].message.content

            return await asyncio.gather(*map(ask, range(32)))

    texts = asyncio.run(ask_all())
    assert all(text == texts[i % 8] for i, text in enumerate(texts))


def test_response_whole_streamed_and_continued(client):
    fields = {"model": MODEL, "input": "What does len do?", "instructions": "Be brief.", "temperature": 0}
    whole = client.responses.create(**fields, max_output_tokens=40)
    assert whole.output_text
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    with client.responses.stream(**fields, max_output_tokens=40) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text == whole.output_text
    assert final.status == whole.status
    stored = client.responses.retrieve(whole.id)
    assert stored.output_text == whole.output_text
    more = client.responses.create(
        model=MODEL, input="And max?", previous_response_id=whole.id, temperature=0, max_output_tokens=8
    )
    assert more.previous_response_id == whole.id
    assert more.usage.input_tokens > whole.usage.output_tokens
    assert client.responses.input_items.list(whole.id).data
    client.responses.delete(whole.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(whole.id)


def test_response_tools_and_formats(client):
    tool = {"type": "function", "name": "travel", "parameters": PLACE, "strict": True}
    fields = {"model": MODEL, "tools": [tool], "temperature": 0, "max_output_tokens": 200}
    called = client.responses.create(**fields, input="Go.", tool_choice={"type": "function", "name": "travel"})
    (call,) = [item for item in called.output if item.type == "function_call"]
    assert json.loads(call.arguments).keys() == {"city", "days"}
    answer = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    turns = [{"role": "user", "content": "Go."}, *called.output, answer]
    ended = client.responses.create(**fields, input=turns, tool_choice="none")
    assert ended.output_text
    by_id = client.responses.create(**fields, input=[answer], previous_response_id=called.id, tool_choice="none")
    assert by_id.output_text == ended.output_text
    parsed = client.responses.parse(
        model=MODEL, input="Where to?", text_format=Visit, temperature=0, max_output_tokens=200
    )
    assert isinstance(parsed.output_parsed, Visit)
    with client.responses.stream(**fields, input="Go.", tool_choice={"type": "function", "name": "travel"}) as stream:
        events = list(stream)
        (streamed,) = [item for item in stream.get_final_response().output if item.type == "function_call"]
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == streamed.arguments == call.arguments


def test_response_in_the_background(client):
    made = client.responses.create(
        model=MODEL, input="What does len do?", background=True, temperature=0, max_output_tokens=16
    )
    assert made.status in ("queued", "in_progress", "completed", "incomplete")
    deadline = time.monotonic() + 60
    while made.status in ("queued", "in_progress"):
        assert time.monotonic() < deadline, made
        time.sleep(0.05)
        made = client.responses.retrieve(made.id)
    assert made.output_text
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.responses.create(model=MODEL, input="hi", temperature=-1)


@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "/v1/completions", "/v1/embeddings"])
def test_batch(client, endpoint):
    bodies = {
        "/v1/chat/completions": {"messages": QUESTION, "max_tokens": 4, "temperature": 0},
        "/v1/completions": {"prompt": "The for statement", "max_tokens": 4, "temperature": 0},
        "/v1/embeddings": {"input": "One"},
    }
    body = {"model": MODEL} | bodies[endpoint]
    bad = body | {"model": "other"}
    lines = [
        {"custom_id": f"{i}", "method": "POST", "url": endpoint, "body": bad if i == 3 else body} for i in range(6)
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    given = client.files.create(file=("requests.jsonl", content), purpose="batch")
    assert (given.bytes, given.filename) == (len(content), "requests.jsonl")
    batch = client.batches.create(input_file_id=given.id, endpoint=endpoint, completion_window="24h")
    deadline = time.monotonic() + 120
    while batch.status in ("validating", "in_progress", "finalizing"):
        assert time.monotonic() < deadline, batch
        time.sleep(0.1)
        batch = client.batches.retrieve(batch.id)
    assert batch.status == "completed"
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (6, 5, 1)
    answers = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    assert sorted(answer["custom_id"] for answer in answers) == ["0", "1", "2", "4", "5"]
    for answer in answers:
        assert answer["response"]["status_code"] == 200
        assert answer["response"]["body"].get("choices") or answer["response"]["body"]["data"]
    (failed,) = [json.loads(line) for line in client.files.content(batch.error_file_id).text.splitlines()]
    assert failed["custom_id"] == "3"
    assert batch.id in [each.id for each in client.batches.list()]
    client.files.delete(given.id)
