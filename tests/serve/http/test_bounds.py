"""Bounds on what one client may send, so that others go on: they come before anything is done with a body."""

import asyncio
import itertools
import json
import threading

import msgspec
import pytest
from support.app import Api, error_of

from rayllm.serve.http import protocol
from rayllm.text.tokenizer import LONG_TEXT

PATHS = {
    "/v1/completions": lambda text: {"prompt": text},
    "/v1/embeddings": lambda text: {"input": text},
    "/v1/chat/completions": lambda text: {"messages": [{"role": "user", "content": text}]},
    "/tokenize": lambda text: {"prompt": text},
}


@pytest.fixture
def api():
    return Api()


def with_context(api, tokens):
    api.state.fake.info = msgspec.structs.replace(api.state.fake.info, max_model_len=tokens)


def seen_by_the_tokenizer(api):
    """(texts that are encoded or made by the template, the threads that do it)."""
    tokenizer, texts, threads = api.state.fake.tokenizer, [], set()
    encode, template = tokenizer.encode, tokenizer.apply_chat_template

    def seen(function, text, *args, **options):
        texts.append(text)
        threads.add(threading.get_ident())
        return function(text, *args, **options)

    tokenizer.encode = lambda text, special=True: seen(encode, text, special)
    tokenizer.apply_chat_template = lambda messages, **options: (
        threads.add(threading.get_ident()) or template(messages, **options)
    )
    return texts, threads


@pytest.mark.parametrize("path", PATHS)
def test_text_that_cannot_fit_is_refused_before_all_of_it_is_tokenised(api, path):
    texts, _ = seen_by_the_tokenizer(api)
    error = error_of(api.post(path, json=PATHS[path]("x" * 1_060_000)), 400)
    assert error["code"] == "context_length_exceeded"
    assert error["param"] in PATHS[path]("")
    limit = 2**17 if path == "/tokenize" else 64
    assert sum(map(len, texts)) <= 2 * limit + LONG_TEXT


def test_text_that_may_fit_is_tokenised_whole(api):
    """Words of many characters a token are no reason to refuse."""
    with_context(api, LONG_TEXT)
    api.state.fake.tokenizer.encode = lambda text, *_: [97] * (len(text) // 40)
    text = "x" * (9 * LONG_TEXT)
    assert api.completion(prompt=text, max_tokens=2).json()["usage"]["prompt_tokens"] == len(text) // 40
    api.state.fake.tokenizer.encode = lambda text, *_: [97] * (len(text) // 8)
    error = error_of(api.completion(prompt=text, max_tokens=2), 400)
    assert error["message"].startswith(f"prompt has {len(text) // 8} tokens and max_tokens asks for 2 more")


@pytest.mark.parametrize("path", PATHS)
def test_what_a_long_body_takes_is_done_in_a_thread(api, path):
    with_context(api, 100_000)
    for length, in_thread in ((100, False), (40_000, True)):
        _, threads = seen_by_the_tokenizer(api)
        body = PATHS[path]("x" * length) | ({"max_tokens": 1} if path.endswith("completions") else {})
        assert api.post(path, json=body).status_code == 200
        assert threads
        assert (threading.get_ident() not in threads) is in_thread


def test_long_bodies_are_validated_in_a_thread(api, monkeypatch):
    threads = []
    validate = protocol.CompletionBody.model_validate
    monkeypatch.setattr(
        protocol.CompletionBody,
        "model_validate",
        lambda value, **options: threads.append(threading.get_ident()) or validate(value, **options),
    )
    for prompt in ("x", "x" * 40_000):
        api.completion(prompt=prompt)
    assert threads[0] == threading.get_ident() != threads[1]


def test_a_body_has_room_for_a_full_context_and_no_more(api):
    for path, a_token in (("/v1/completions", 8192), ("/v1/embeddings", 8192), ("/tokenize", 1024)):
        for context, limit in ((64, 2**20 + 64 * a_token), (10**6, 32 * 2**20)):
            with_context(api, context)
            body = json.dumps(PATHS[path]("x")).encode()
            assert api.post(path, content=body.ljust(limit)).status_code == 200
            error = error_of(api.post(path, content=body.ljust(limit + 1)), 413)
            assert (error["code"], str(limit) in error["message"]) == ("request_too_large", True)


TOO_MANY = {
    "messages": ("/v1/chat/completions", '{"messages": [', '{"role":"user","content":""},', "]}"),
    "wrong messages": ("/v1/chat/completions", '{"messages": [', "{},", "]}"),
    "parts": ("/v1/chat/completions", '{"messages": [{"content": [', '{"type":"text","text":""},', "]}]}"),
    "tokenize": ("/tokenize", '{"messages": [', '{"role":"user","content":""},', "]}"),
    "prompts": ("/v1/completions", '{"prompt": [', "[1],", "]}"),
    "inputs": ("/v1/embeddings", '{"input": [', "[1],", "]}"),
    "unknown fields": ("/v1/completions", '{"prompt": "a", ', '"a#": 1,', "}"),
    "biases": ("/v1/completions", '{"prompt": "a", "logit_bias": {', '"#": 1,', "}}"),
    "stops": ("/v1/completions", '{"prompt": "a", "stop": [', "1,", "]}"),
    "metadata": ("/v1/completions", '{"prompt": "a", "metadata": {', '"a#": 1,', "}}"),
    "no object": ("/v1/completions", "[", "1,", "]"),
    "schemas": ("/v1/completions", '{"prompt": "a", "response_format": {"json_schema": {"schema": [', "[1],", "]}}}"),
}


@pytest.mark.parametrize("name", TOO_MANY)
def test_too_many_values_are_refused_before_they_are_checked(api, name, monkeypatch):
    """Each would take the validation, and the list of its errors, a second or more."""
    for kind in (protocol.ChatBody, protocol.CompletionBody, protocol.TokenizeBody, protocol.EmbeddingBody):
        monkeypatch.setattr(kind, "model_validate", lambda *_, **__: pytest.fail("it was validated"))
    with_context(api, 4096)
    path, begin, unit, end = TOO_MANY[name]
    count = 600_000 if unit == "[1]," else 70_000
    many = "".join(unit.replace("#", str(i)) for i in range(count)).rstrip(",")
    message = error_of(api.post(path, content=f"{begin}{many}{end}".encode()), 400)["message"]
    assert "too many values" in message or "more than 65536 values" in message


def test_many_values_of_prompts_are_taken(api):
    with_context(api, 10**6)
    assert api.completion(prompt=[5] * 500_000, max_tokens=1).status_code == 200
    assert api.completion(prompt=[[5] * 1000] * 100, max_tokens=1).status_code == 200
    assert api.completion(prompt="[{, :" * 100_000, max_tokens=1).status_code == 200
    turns = [{"role": "user", "content": "a"}] * 20_000
    assert api.post("/v1/chat/completions", json={"messages": turns, "max_tokens": 1}).status_code == 200


def test_the_prompts_of_one_request_leave_others_their_turn(api):
    """While a request with a thousand prompts begins, whatever else is due in the event loop runs in between."""
    between = []

    async def scenario():
        sent = asyncio.create_task(asyncio.to_thread(lambda: None))
        body, done = json.dumps({"prompt": ["a"] * 1000, "max_tokens": 1}).encode(), []

        async def receive():
            if not done:
                done.append(True)
                return {"type": "http.request", "body": body}
            await asyncio.sleep(3600)

        async def send(message):
            pass

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"", "query_string": b""}
        asked = asyncio.create_task(api.app(scope | {"headers": [], "asgi": {"spec_version": "2.3"}}, receive, send))
        while not asked.done():
            between.append(len(api.state.fake.started))
            await asyncio.sleep(0)
        await asked
        await sent

    asyncio.run(scenario())
    assert len(api.state.fake.started) == 1000
    assert max(b - a for a, b in itertools.pairwise(between)) <= 2
