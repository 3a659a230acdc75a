"""The app over a scripted engine, for /v1/responses: by the openai client, and as events that its types validate."""

import asyncio
import json

import httpx
import openai
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from support.app import FakeState
from support.chat import ScriptedEngine
from support.chat_templates import HERMES

from rayllm.config.options import ServerConfig
from rayllm.serve.http.app import create_app
from rayllm.serve.http.responses.store import ResponseStore

STREAM_EVENT = TypeAdapter(ResponseStreamEvent)
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


class Conversation:
    """An app over an engine that plays scripts; `engine` is that. folder: of its store; one of its own if None."""

    def __init__(self, *scripts, source=HERMES, step=3, finish="stop", fails=None, folder=None, keys=(), engine=None):
        self.state = FakeState(ServerConfig())
        self.state.fake = self.engine = engine or ScriptedEngine(source, scripts, step, finish, fails)
        if folder is not None:
            self.state.response_store = ResponseStore(folder)
        self.app = create_app(self.state, ServerConfig(), keys)

    def web(self, key="k"):
        """A web client of the app."""
        headers = {"authorization": f"Bearer {key}"}
        transport = httpx.ASGITransport(app=self.app)
        return httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers)

    def run(self, use, key="k"):
        """The result of the async function `use`, called with an openai client of the app."""

        async def call():
            async with self.web(key) as web:
                client = openai.AsyncOpenAI(base_url="http://test/v1", api_key=key, http_client=web, max_retries=0)
                return await use(client)

        return asyncio.run(call())

    def create(self, **fields):
        """One whole answer, as the client has it."""
        return self.run(lambda client: client.responses.create(**_fields(fields)))

    def final(self, **fields):
        """What the client's own stream helper makes of a streamed answer."""

        async def use(client):
            async with client.responses.stream(**_fields(fields)) as stream:
                return await stream.get_final_response()

        return self.run(use)

    def post(self, path="/v1/responses", key="k", **fields):
        """The HTTP answer."""
        return self.request("POST", path, key, json=fields)

    def get(self, path, key="k"):
        return self.request("GET", path, key)

    def request(self, method, path, key="k", **options):
        async def call():
            async with self.web(key) as web:
                return await web.request(method, path, **options)

        return asyncio.run(call())

    def events(self, **fields):
        """All events of a streamed answer, each valid for the client."""
        return events_of(self.post(**{"input": "hi", "stream": True} | fields).text)

    def prompt(self):
        """What the engine was asked last."""
        return self.engine.prompts[-1]


def events_of(text):
    """The events of an SSE stream as JSON, after a look at their form."""
    frames = text.split("\n\n")
    assert frames.pop() == ""
    found = []
    for frame in frames:
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        STREAM_EVENT.validate_python(event)
        found.append(event)
    assert [event["sequence_number"] for event in found] == [found[0]["sequence_number"] + i for i in range(len(found))]
    return found


def valid(response):
    """The Response object as the client's type, which all of its fields fit."""
    return Response.model_validate(response, strict=True)


def same(response):
    """What is the same in two answers to one request: all but ids and times."""
    text = json.dumps(response)
    text = text.replace(response["id"].removeprefix("resp_"), "ID")
    for item in response["output"]:
        if "call_id" in item:
            text = text.replace(item["call_id"], "CALL")
    return json.loads(text) | {"created_at": 0, "completed_at": 0}


def _fields(fields):
    return {"model": "org/fake", "input": "hi"} | fields
