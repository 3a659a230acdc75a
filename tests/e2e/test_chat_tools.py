"""Enforced tool calls and structured answers by the bundled model, through the app and the openai client."""

import asyncio
import json
import shutil

import httpx
import jsonschema
import openai
import pytest
from support.app import FakeState
from support.chat_templates import HERMES

from rayllm.config.options import BUNDLED_MODEL, EngineConfig, ServerConfig
from rayllm.engine.async_engine import AsyncEngine
from rayllm.serve.http.app import create_app

PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "near": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["city", "near"],
    "additionalProperties": False,
}
VISIT = {
    "$ref": "#/$defs/place",
    "$defs": {"place": {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "travel", "parameters": PLACE}},
    {"type": "function", "function": {"name": "weather", "parameters": VISIT}},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The bundled model with a template that shows tools."""
    folder = shutil.copytree(BUNDLED_MODEL, tmp_path_factory.mktemp("model") / "tools")
    (folder / "chat_template.jinja").write_text(HERMES)
    return folder


def with_client(model, use):
    """The result of the async function `use`, called with an openai client of the app over an engine."""

    async def call():
        server = ServerConfig(reasoning_parser="none")  # the template has the tags, but this model does not reason
        state = FakeState(server)
        state.fake = AsyncEngine.from_config(EngineConfig(model=str(model), device="cpu", num_gpu_blocks_override=256))
        try:
            await state.fake.start()
            transport = httpx.ASGITransport(app=create_app(state, server))
            async with httpx.AsyncClient(transport=transport) as web:
                return await use(openai.AsyncOpenAI(base_url="http://test/v1", api_key="k", http_client=web))
        finally:
            await state.fake.close()

    return asyncio.run(call())


def test_enforced_calls_fit_their_schemas(model):
    async def use(client):
        found = []
        for seed, choice in enumerate(("required", {"type": "function", "function": {"name": "weather"}})):
            fields = {
                "model": "org/fake",
                "messages": [{"role": "user", "content": "Where to?"}],
                "tools": TOOLS,
                "tool_choice": choice,
                "max_tokens": 600,
                "seed": seed,
                "parallel_tool_calls": False,
            }
            whole = await client.chat.completions.create(**fields)
            async with client.chat.completions.stream(**fields) as stream:
                streamed = await stream.get_final_completion()
            found.append([answer.choices[0] for answer in (whole, streamed)])
        return found

    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    for choices in with_client(model, use):
        (call,), (streamed,) = (choice.message.tool_calls for choice in choices)
        assert [choice.finish_reason for choice in choices] == ["tool_calls"] * 2
        assert (call.function.name, call.function.arguments) == (streamed.function.name, streamed.function.arguments)
        jsonschema.validate(json.loads(call.function.arguments), schemas[call.function.name])


def test_a_schema_that_cannot_be_enforced_is_refused_by_the_field_it_came_in(model):
    broken = {"type": "object", "properties": {"x": {"$ref": "#/$defs/none"}}}

    async def use(client):
        fields = {"model": "org/fake", "messages": [{"role": "user", "content": "hi"}]}
        refused = []
        for more in (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": broken}}],
                "tool_choice": "required",
            },
            {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": broken}}},
            {"extra_body": {"structured_outputs": {"json": broken}}},
        ):
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(**fields, **more)
            refused.append(caught.value.body["param"])
        return refused

    assert with_client(model, use) == ["tools", "response_format", "structured_outputs"]


def test_beams(model):
    """Over HTTP: the most likely text first, in completions and chats; no text by any other means is more likely."""

    async def use(client):
        fields = {"model": "org/fake", "max_tokens": 8, "logprobs": 0}
        beams = {"use_beam_search": True, "length_penalty": 0.5, "early_stopping": True}
        found = await client.completions.create(
            prompt=["The for statement", "Return"], n=2, best_of=4, extra_body=beams, **fields
        )
        greedy = await client.completions.create(prompt=["The for statement", "Return"], temperature=0, **fields)
        talk = [{"role": "user", "content": "What does len do?"}]
        chat = await client.chat.completions.create(
            model="org/fake", messages=talk, max_tokens=8, n=2, extra_body={**beams, "best_of": 3}
        )
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(
                model="org/fake", messages=talk, tools=TOOLS, tool_choice="required", n=2, extra_body=beams
            )
        return found, greedy, chat, caught.value.body

    found, greedy, chat, refusal = with_client(model, use)

    def score(choice, penalty=0.5):
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs) ** penalty

    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    for prompt in range(2):
        first, second = found.choices[2 * prompt : 2 * prompt + 2]
        assert score(first) >= score(second) and first.text != second.text
        assert score(first) >= score(greedy.choices[prompt]) - 1e-4
    assert found.usage.completion_tokens == sum(len(choice.logprobs.tokens) for choice in found.choices)
    texts = [choice.message.content for choice in chat.choices]
    assert len(set(texts)) == 2 and all(texts)
    assert refusal["param"] == "tools" and "use_beam_search" in refusal["message"]


def test_best_of_and_echo(model):
    async def use(client):
        best = await client.completions.create(
            model="org/fake", prompt="The for statement", max_tokens=8, best_of=4, n=4, seed=3, logprobs=0
        )
        some = await client.completions.create(
            model="org/fake", prompt="The for statement", max_tokens=8, best_of=4, n=2, seed=3
        )
        echoed = await client.completions.create(
            model="org/fake", prompt="The for statement", max_tokens=0, echo=True, logprobs=2
        )
        return best, some, echoed

    every, some, echoed = with_client(model, use)

    def mean(choice):
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    assert [c.text for c in some.choices] == [c.text for c in sorted(every.choices, key=mean, reverse=True)[:2]]
    assert (echoed.choices[0].text, echoed.usage.completion_tokens) == ("The for statement", 0)
    logprobs = echoed.choices[0].logprobs
    pieces = [echoed.choices[0].text[at:] for at in logprobs.text_offset]
    assert all(piece.startswith(token) for piece, token in zip(pieces, logprobs.tokens, strict=True))
    assert logprobs.token_logprobs[0] is None
    assert all(token in top for token, top in zip(logprobs.tokens[1:], logprobs.top_logprobs[1:], strict=True))
