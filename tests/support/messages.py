"""A scripted engine behind the app, for Anthropic's client; and what it sends against that client's own types."""

import asyncio
import json

import anthropic
import httpx2
import pydantic
from anthropic.types import Message, RawMessageStreamEvent
from support.chat import Played

EVENTS = pydantic.TypeAdapter(RawMessageStreamEvent)
MESSAGE = pydantic.TypeAdapter(Message)


class Answered(Played):
    """The app over a scripted engine, asked by Anthropic's client."""

    def run(self, use):
        """The result of the async function `use`, called with an anthropic client of the app."""
        return asyncio.run(with_client(self.app, use))

    def message(self, **fields):
        """One whole answer."""
        return checked(self.run(lambda client: client.messages.create(**message_fields(fields))))

    def final(self, **fields):
        """What the client's own stream helper makes of a streamed answer."""

        async def use(client):
            async with client.messages.stream(**message_fields(fields)) as stream:
                return await stream.get_final_message()

        return checked(self.run(use))

    def events(self, **fields):
        """All events of a streamed answer as they are sent, each checked against the client's types."""

        async def use(client):
            body = message_fields(fields) | {"stream": True}
            response = await client.messages.with_raw_response.create(**body)
            return await response.http_response.aread()

        return events_of(self.run(use).decode())


async def with_client(app, use, **options):
    transport = httpx2.ASGITransport(app=app)
    async with httpx2.AsyncClient(transport=transport) as web:
        options = {"api_key": "k", "max_retries": 0, "timeout": 60} | options
        return await use(anthropic.AsyncAnthropic(base_url="http://test", http_client=web, **options))


def message_fields(fields):
    return {"model": "org/fake", "max_tokens": 1000, "messages": [{"role": "user", "content": "hi"}]} | fields


def events_of(text):
    """The payloads of a stream, each valid by the client's types, and named as its `type`."""
    events = []
    for frame in text.removesuffix("\n\n").split("\n\n"):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] not in ("ping", "error"):  # which the client reads without a type
            check_extra(EVENTS.validate_python(event))
        events.append(event)
    return events


def checked(message):
    """A message, which has nothing that the client's types lack."""
    check_extra(message)
    MESSAGE.validate_python(message.model_dump())
    return message


def check_extra(value):
    """Raises if a model anywhere in this has fields that its type lacks."""
    if isinstance(value, pydantic.BaseModel):
        assert not value.model_extra, (type(value), value.model_extra)
        for _, each in value:
            check_extra(each)
    elif isinstance(value, list):
        for each in value:
            check_extra(each)
