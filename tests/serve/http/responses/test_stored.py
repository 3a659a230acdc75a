"""Responses that are stored: read, listed, continued, deleted, each by its own API key."""

from __future__ import annotations

import pytest
from openai.types.responses import ResponseItem
from pydantic import TypeAdapter
from support.app import error_of
from support.chat_templates import PLAIN
from support.responses import CALL, WEATHER, Conversation

from rayllm.config.options import ServerConfig
from rayllm.serve.http.auth import load_api_keys

ITEM = TypeAdapter(ResponseItem)


def test_a_response_is_read_again():
    app = Conversation("one", "two")
    for stream in (False, True):
        made = app.events()[-1]["response"] if stream else app.post(input="hi").json()
        answer = app.get(f"/v1/responses/{made['id']}")
        assert (answer.status_code, answer.json()) == (200, made)


def test_compaction_is_refused_with_a_reason():
    error = error_of(Conversation().request("POST", "/v1/responses/compact", json={"model": "m", "input": "hi"}), 404)
    assert error["code"] == "not_supported" and "shorten the input" in error["message"]


def test_what_is_not_stored():
    app = Conversation("one", "two", "three")
    made = app.post(input="hi", store=False).json()
    error = error_of(app.get(f"/v1/responses/{made['id']}"), 404)
    assert (error["code"], error["param"]) == ("response_not_found", "response_id")
    refused = app.post(input="ho", previous_response_id=made["id"])
    assert error_of(refused, 400)["param"] == "previous_response_id"
    item = {"type": "item_reference", "id": made["output"][0]["id"]}
    assert error_of(app.post(input=[item]), 400)["param"] == "input"


def test_a_conversation_goes_on():
    app = Conversation("one", "two", "three", source=PLAIN)
    first = app.create(input="hi", instructions="Be brief.")
    second = app.create(input="ho", previous_response_id=first.id)
    assert app.prompt() == "user: hi\nassistant: one\nuser: ho\n", "instructions are not carried over"
    assert app.request("DELETE", f"/v1/responses/{first.id}").status_code == 200
    third = app.create(input="hu", previous_response_id=second.id, instructions="Rhyme.")
    assert app.prompt() == "system: Rhyme.\nuser: hi\nassistant: one\nuser: ho\nassistant: two\nuser: hu\n"
    assert third.previous_response_id == second.id


def test_tools_and_references():
    app = Conversation(CALL, "Sunny.", "Yes.", step=100)
    first = app.create(input="How is Rome?", tools=[WEATHER])
    (call,) = first.output
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}
    second = app.create(input=[output], previous_response_id=first.id, tools=[WEATHER])
    assert "<tool_response>\nsun\n</tool_response>" in app.prompt() and '"city": "Rome"' in app.prompt()
    before = app.prompt()
    referenced = [
        {"role": "user", "content": "How is Rome?"},
        {"type": "item_reference", "id": call.id},
        output,
        {"id": second.output[0].id},  # of which clients leave out the type
    ]
    app.create(input=referenced, tools=[WEATHER])
    assert app.prompt().startswith(before.rstrip()) and "Sunny." in app.prompt()


def test_input_items():
    app = Conversation(CALL, "Sunny.", step=100)
    first = app.create(
        input=[{"role": "user", "content": "Rome?"}, {"role": "assistant", "content": "What?"}], tools=[WEATHER]
    )
    output = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "sun"}
    second = app.create(input=[output, {"type": "reasoning", "summary": []}], previous_response_id=first.id)

    def page(**query):
        async def use(client):
            return await client.responses.input_items.list(second.id, **query)

        return app.run(use)

    whole = page(order="asc")
    kinds = ["message", "message", "function_call", "function_call_output", "reasoning"]
    assert [item.type for item in whole.data] == kinds and not whole.has_more
    listed = app.get(f"/v1/responses/{second.id}/input_items?order=asc").json()
    for item in listed["data"]:
        ITEM.validate_python(item)
    ids = [item["id"] for item in listed["data"]]
    assert len(set(ids)) == 5 and (listed["first_id"], listed["last_id"]) == (ids[0], ids[-1])
    assert [item.id for item in page().data] == ids[::-1]
    two = page(order="asc", limit=2)
    assert [item.id for item in two.data] == ids[:2] and two.has_more
    rest = page(order="asc", limit=3, after=ids[1])
    assert [item.id for item in rest.data] == ids[2:] and not rest.has_more

    async def every(client):
        return [item.id async for item in client.responses.input_items.list(second.id, order="asc", limit=2)]

    assert app.run(every) == ids


@pytest.mark.parametrize(
    ("query", "param"), [("limit=0", "limit"), ("limit=x", "limit"), ("order=up", "order"), ("after=nobody", "after")]
)
def test_pages_that_cannot_be(query, param):
    app = Conversation("one")
    made = app.create()
    error = error_of(app.get(f"/v1/responses/{made.id}/input_items?{query}"), 400)
    assert error["param"] == param and param in error["message"]


def test_delete():
    app = Conversation("one")
    path = f"/v1/responses/{app.create().id}"
    assert app.request("DELETE", path).json() == {"id": path[-37:], "object": "response", "deleted": True}
    for answer in (app.get(path), app.get(f"{path}/input_items"), app.request("DELETE", path)):
        error_of(answer, 404)


def test_each_key_has_its_own():
    keys = load_api_keys(ServerConfig(), {"RAYLLM_API_KEYS": "one two"})
    app = Conversation("a", "b", keys=keys)
    made = app.post(key="one", input="hi").json()
    path = f"/v1/responses/{made['id']}"
    assert app.get(path, key="one").status_code == 200
    for method, end in (
        ("GET", ""),
        ("DELETE", ""),
        ("GET", "/input_items"),
        ("POST", "/cancel"),
        ("GET", "?stream=true"),
    ):
        error_of(app.request(method, path + end, key="two"), 404)
        error_of(app.request(method, path + end, key="none"), 401)
    error_of(app.post(key="two", input="ho", previous_response_id=made["id"]), 400)
    error_of(app.post(key="two", input=[{"type": "item_reference", "id": made["output"][0]["id"]}]), 400)
    assert app.get(path, key="one").status_code == 200


@pytest.mark.parametrize("name", ["..%2F..%2Fetc%2Fpasswd", "resp_" + "0" * 32, ".lock", "resp_x", "%00", "a" * 5000])
def test_names_that_are_none(name):
    app = Conversation("one")
    assert app.get(f"/v1/responses/{name}").status_code == 404
    assert error_of(app.post(input="hi", previous_response_id=name[:100]), 400)["param"] == "previous_response_id"


def test_only_background_responses_are_cancelled_or_followed():
    app = Conversation("one")
    path = f"/v1/responses/{app.create().id}"
    assert "background" in error_of(app.request("POST", f"{path}/cancel"), 400)["message"]
    assert error_of(app.get(f"{path}?stream=true"), 400)["param"] == "stream"
    assert error_of(app.get(f"{path}?starting_after=3"), 400)["param"] == "starting_after"
