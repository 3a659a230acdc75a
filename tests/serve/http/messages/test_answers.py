"""/v1/messages through Anthropic's own client and the app, over a scripted engine."""

import json

import anthropic
import jsonschema
import pydantic
import pytest
from support.chat_templates import HERMES, LLAMA3, PLAIN, THINKER
from support.messages import Answered

from rayllm.api.types import CompletionOutput
from rayllm.errors import EngineDeadError

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "Of a city.", "input_schema": CITY}
NOW = {"name": "now", "input_schema": {"type": "object", "properties": {}}, "type": "custom"}
TOOLS = [WEATHER, NOW]
START = "<|im_start|>assistant\n"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'


@pytest.fixture(params=["whole", "stream"])
def ask(request):
    """Asks for an answer, whole or streamed."""
    return lambda app, **fields: app.message(**fields) if request.param == "whole" else app.final(**fields)


def blocks(message):
    """The content, without ids and signatures, which are checked here."""
    found = []
    for block in message.content:
        match block.type:
            case "text":
                found.append(block.text)
            case "thinking":
                assert block.signature
                found.append(("thinking", block.thinking))
            case "tool_use":
                assert block.id.startswith("toolu_")
                found.append((block.name, block.input))
    return found


def test_text(ask):
    app = Answered("Hello you.")
    message = ask(app)
    assert blocks(message) == ["Hello you."]
    assert (message.type, message.role, message.model) == ("message", "assistant", "org/fake")
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.id.startswith("msg_")
    assert app.engine.prompts == ["<|im_start|>system\nBe helpful.<|im_end|>\n<|im_start|>userhi<|im_end|>\n" + START]
    prompt = len(app.engine.prompts[0])
    usage = message.usage
    assert (usage.input_tokens, usage.output_tokens) == (prompt, len("Hello you.") + 1)
    assert (usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (0, 0)


def test_cached_tokens_are_counted_apart(ask):
    app = Answered("Hello.")
    answer = app.engine.generate

    async def generate(request, prompt_text=None):
        async for output in answer(request, prompt_text):
            output.num_cached_tokens = 32
            yield output

    app.engine.generate = generate
    usage = ask(app).usage
    assert (usage.cache_read_input_tokens, usage.input_tokens) == (32, len(app.engine.prompts[0]) - 32)


def test_the_events_of_a_text():
    events = Answered("Hello you.").events()
    assert [event["type"] for event in events] == [
        *("message_start", "ping", "content_block_start"),
        *["content_block_delta"] * 4,
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    start = events[0]["message"]
    assert (start["content"], start["stop_reason"], start["stop_sequence"]) == ([], None, None)
    assert start["usage"]["input_tokens"] > 0
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta["text"] for delta in deltas) == "Hello you."
    assert {event.get("index", 0) for event in events} == {0}
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == len("Hello you.") + 1


@pytest.mark.parametrize("step", [1, 2, 7, 1000])
@pytest.mark.parametrize(
    ("source", "script", "content"),
    [
        (HERMES, CALL, [("get_weather", {"city": "Köln"})]),
        (HERMES, f"I look.\n{CALL}\n{CALL} Done", ["I look.\n", *[("get_weather", {"city": "Köln"})] * 2, " Done"]),
        (HERMES, f"<think>Hm.</think>{CALL}", [("thinking", "Hm."), ("get_weather", {"city": "Köln"})]),
        (LLAMA3, '{"name": "now", "parameters": {}}', [("now", {})]),
    ],
)
def test_tools(ask, step, source, script, content):
    message = ask(Answered(script, source=source, step=step), tools=TOOLS)
    assert [each.strip() if isinstance(each, str) else each for each in blocks(message)] == [
        each.strip() if isinstance(each, str) else each for each in content
    ]
    assert (message.stop_reason, message.stop_sequence) == ("tool_use", None)
    assert len({block.id for block in message.content if block.type == "tool_use"}) == sum(
        block[0] in ("get_weather", "now") for block in content
    )


SCRIPT = f"<think>First I\nlook.</think>So: {CALL}{CALL.replace('Köln', 'Bonn')}"


def without_ids(message):
    fields = message.to_dict(exclude_none=True) | {"id": "msg"}
    names = ("id", "signature")
    fields["content"] = [{k: v for k, v in block.items() if k not in names} for block in fields["content"]]
    return fields


@pytest.mark.parametrize("step", [1, 3, 5, 1000])
def test_a_stream_is_the_whole_answer(step):
    whole = Answered(SCRIPT).message(tools=TOOLS)
    assert without_ids(Answered(SCRIPT, step=step).final(tools=TOOLS)) == without_ids(whole)


def test_the_events_of_all_blocks():
    events = Answered(SCRIPT, step=2).events(tools=TOOLS)
    opened = [event for event in events if event["type"] == "content_block_start"]
    assert [event["index"] for event in opened] == [0, 1, 2, 3]
    started = [event["content_block"] for event in opened]
    assert [block["type"] for block in started] == ["thinking", "text", "tool_use", "tool_use"]
    assert (started[0]["signature"], started[2]["name"], started[2]["input"]) == ("", "get_weather", {})
    deltas = [[event["delta"] for event in events if "delta" in event and event.get("index") == i] for i in range(4)]
    kinds = [[delta["type"] for delta in each] for each in deltas]
    assert set(kinds[0][:-1]) == {"thinking_delta"} and kinds[0][-1] == "signature_delta"
    assert set(kinds[1]) == {"text_delta"}
    assert set(kinds[2]) == set(kinds[3]) == {"input_json_delta"}
    assert len(kinds[2]) > 3, "input streams as it is written"
    assert json.loads("".join(delta["partial_json"] for delta in deltas[3])) == {"city": "Bonn"}
    borders = ("content_block_start", "content_block_stop")
    order = [(event["type"], event["index"]) for event in events if event["type"] in borders]
    assert order == [(border, index) for index in range(4) for border in borders]


@pytest.mark.parametrize(
    ("choice", "script", "names", "bad"),
    [
        (
            {"type": "any"},
            '[{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]',
            ["now"] * 2,
            '"text"',
        ),
        (
            {"type": "any", "disable_parallel_tool_use": True},
            '{"name": "now", "arguments": {}}',
            ["now"],
            '[{"name": "now", "arguments": {}}]',
        ),
        (
            {"type": "tool", "name": "get_weather"},
            '{"name": "get_weather", "arguments": {"city": "B"}}',
            ["get_weather"],
            '{"name": "now", "arguments": {}}',
        ),
    ],
)
def test_enforced_tools(ask, choice, script, names, bad):
    app = Answered(script)
    message = ask(app, tools=TOOLS, tool_choice=choice)
    assert message.stop_reason == "tool_use"
    assert [block.name for block in message.content] == names
    check = jsonschema.Draft202012Validator(app.schema())
    assert check.is_valid(json.loads(script))
    assert not check.is_valid(json.loads(bad))


def test_no_tools_or_one_call(ask):
    app = Answered(CALL, f"{CALL}{CALL}")
    assert blocks(ask(app, tools=TOOLS, tool_choice={"type": "none"})) == [CALL]
    assert "get_weather" not in app.engine.prompts[0]
    message = ask(app, tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert blocks(message) == [("get_weather", {"city": "Köln"})]


def test_a_round_trip_with_a_tool():
    app = Answered(f"<think>The weather...</think>I look.{CALL}", "It is sunny.")

    async def use(client):
        turns = [{"role": "user", "content": "Weather in Köln?"}]
        fields = {"model": "org/fake", "max_tokens": 100, "tools": TOOLS}
        message = await client.messages.create(messages=turns, **fields)
        (call,) = [block for block in message.content if block.type == "tool_use"]
        content = [{"type": "text", "text": "sunny"}, {"type": "text", "text": "warm"}]
        result = {"type": "tool_result", "tool_use_id": call.id, "content": content}
        turns += [{"role": "assistant", "content": message.content}]
        turns += [{"role": "user", "content": [result, {"type": "text", "text": "And?"}]}]
        return await client.messages.create(messages=turns, **fields)

    assert blocks(app.run(use)) == ["It is sunny."]
    prompt = app.engine.prompts[1]
    assert f"assistantI look.{CALL}<|im_end|>" in prompt
    answer = "<|im_start|>user\n<tool_response>\nsunny\nwarm\n</tool_response><|im_end|>\n"
    assert prompt.endswith(f"{answer}<|im_start|>userAnd?<|im_end|>\n{START}")


def test_input_that_is_cut_or_no_json():
    (cut,) = Answered(CALL.split("öln")[0], finish="length").message(tools=TOOLS).content
    assert cut.input == {}
    script = '<tool_call>{"name": "get_weather", "arguments": {"city": "A", "days": [1, 2'
    for ask in (Answered.message, Answered.final):
        message = ask(Answered(script, finish="length"), tools=TOOLS)
        assert (message.content[0].input, message.stop_reason) == ({"city": "A", "days": [1, 2]}, "max_tokens")
    script = '<tool_call>{"name": "get_weather", "arguments": {"city" "A"}}</tool_call>'
    (bad,) = Answered(script).message(tools=TOOLS).content
    assert bad.input == {"INVALID_JSON": '{"city" "A"}'}
    big = '<tool_call>{"name": "now", "arguments": {"n": 123456789012345678901234567890}}</tool_call>'
    assert Answered(big).message(tools=TOOLS).content[0].input == {"n": 123456789012345678901234567890}


def test_an_answer_that_was_begun():
    app = Answered("r dogs.", source=PLAIN)
    turns = [{"role": "user", "content": "List."}, {"role": "assistant", "content": [{"type": "text", "text": "Fou"}]}]
    assert blocks(app.message(messages=turns)) == ["r dogs."]
    assert app.engine.prompts == ["user: List.\nassistant: Fou"]


# ---- how it ends


def ended(app, stop_reason):
    """The app, whose completions end so."""
    make = app.engine._part

    def part(*args):
        made = make(*args)
        return CompletionOutput(made.index, made.text, made.token_ids, None, None, made.finish_reason, stop_reason)

    app.engine._part = part
    return app


@pytest.mark.parametrize(
    ("stop_reason", "expected"),
    [("END", ("stop_sequence", "END")), (7, ("end_turn", None)), (None, ("end_turn", None))],
)
def test_stop_sequences(ask, stop_reason, expected):
    app = ended(Answered("a text"), stop_reason)
    message = ask(app, stop_sequences=["never", "END"])
    assert app.params.stop == ["never", "END"]
    assert (message.stop_reason, message.stop_sequence) == expected


def test_max_tokens(ask):
    app = Answered("a text", "a text", "a", finish="length")
    assert ask(app, max_tokens=6).stop_reason == "max_tokens"
    assert app.params.max_tokens == 6
    assert ask(app, max_tokens=10**6).stop_reason == "model_context_window_exceeded"
    assert app.params.max_tokens == app.engine.info.max_model_len - len(app.engine.prompts[-1])
    warmed = ask(app, max_tokens=0)
    assert (warmed.content, warmed.stop_reason, warmed.usage.output_tokens) == ([], "max_tokens", 0)


# ---- thinking


def test_thinking(ask):
    app = Answered(*["<think>\nThree.\n</think>\n\nIt is 3."] * 3, "It is 3.")
    assert blocks(ask(app)) == [("thinking", "Three."), "It is 3."]
    message = ask(app, thinking={"type": "enabled", "budget_tokens": 2000})
    assert blocks(message) == [("thinking", "Three."), "It is 3."]
    assert message.usage.output_tokens_details.thinking_tokens == len("<think>\nThree.\n</think>")
    message = ask(app, thinking={"type": "adaptive", "display": "omitted"})
    assert blocks(message) == [("thinking", ""), "It is 3."]
    assert blocks(ask(app, thinking={"type": "disabled"})) == ["It is 3."]
    empty = "<think>\n\n</think>\n\n"
    assert [prompt.endswith(empty) for prompt in app.engine.prompts] == [False, False, False, True]


def test_a_model_that_always_thinks(ask):
    app = Answered("Three.</think>It is 3.", source=THINKER)
    assert blocks(ask(app, thinking={"type": "disabled"})) == [("thinking", "Three."), "It is 3."]


def test_a_model_that_never_thinks(ask):
    app = Answered("It is 3.", source=PLAIN)
    message = ask(app, thinking={"type": "enabled", "budget_tokens": 1024})
    assert (blocks(message), message.usage.output_tokens_details) == (["It is 3."], None)


def test_variables_of_templates():
    source = PLAIN + "{{ [thinking, thinking_budget, reasoning_effort, mood] | tojson }}"
    app = Answered(*[""] * 3, source=source)
    config = {"thinking": {"type": "enabled", "budget_tokens": 2000}, "output_config": {"effort": "max"}}
    app.message(**config, extra_body={"chat_template_kwargs": {"mood": "calm"}})
    assert app.engine.prompts[-1].endswith('[true, 2000, "max", "calm"]')
    given = {"chat_template_kwargs": {"thinking_budget": 1, "mood": None}}
    app.message(thinking={"type": "disabled"}, output_config={"effort": "low"}, extra_body=given)
    assert app.engine.prompts[-1].endswith('[false, 1, "low", null]')


def test_thinking_comes_back():
    source = "{% for m in messages %}{{ m.role }}({{ m.reasoning_content }}|{{ m.content }}){% endfor %}"
    app = Answered("Yes.", source=source)
    content = [
        {"type": "thinking", "thinking": "Hm.", "signature": "anything"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "B."},
    ]
    turns = [("user", "A?"), ("assistant", content), ("user", "Sure?")]
    app.message(messages=[{"role": role, "content": each} for role, each in turns])
    assert app.engine.prompts == ["user(|A?)assistant(Hm.|B.)user(|Sure?)"]


# ---- structured outputs


class Place(pydantic.BaseModel):
    """Where something is."""

    city: str
    days: int


def test_structured_outputs():
    script = '{"city": "Köln", "days": 3}'
    app = Answered(*[script] * 4)

    async def use(client):
        fields = {"model": "org/fake", "max_tokens": 100, "messages": [{"role": "user", "content": "hi"}]}
        parsed = await client.messages.parse(**fields, output_format=Place)
        async with client.messages.stream(**fields, output_format=Place) as stream:
            return parsed.parsed_output, (await stream.get_final_message()).parsed_output

    assert app.run(use) == (Place(city="Köln", days=3),) * 2
    assert app.schema()["properties"].keys() == {"city", "days"}
    form = {"type": "json_schema", "schema": CITY}
    for fields in ({"output_config": {"format": form}}, {"extra_body": {"output_format": form}}):
        assert blocks(app.message(**fields)) == [script]
        assert app.schema() == CITY | {"additionalProperties": False}


# ---- failures in a stream


def test_an_error_in_a_stream():
    app = Answered("a long text", fails={2: EngineDeadError("a worker was lost")})
    *events, error = app.events()
    assert [event["type"] for event in events[:3]] == ["message_start", "ping", "content_block_start"]
    assert error["type"] == "error"
    assert error["error"]["type"] == "overloaded_error"
    assert error["error"]["message"].endswith("a worker was lost")
    assert error["request_id"]
    app = Answered("a long text", fails={2: EngineDeadError("a worker was lost")})
    with pytest.raises(anthropic.APIStatusError, match="a worker was lost"):
        app.final()
