"""Admission and deadlines, alone and in the app: surplus is refused at once, late requests are answered and aborted."""

import asyncio
import json

import httpx
import pytest
from support.app import Api, counted, staged

from rayllm.api.types import Load
from rayllm.config.options import ServerConfig
from rayllm.serve.http import limits as module
from rayllm.serve.http import request
from rayllm.serve.http.errors import ApiError
from rayllm.serve.http.limits import Admission, Ticket


def refused(code, call, *args):
    with pytest.raises(ApiError) as caught:
        call(*args)
    error = caught.value
    assert (error.status_code, error.code, error.headers) == (429, code, {"retry-after": "1"})
    return error.detail


def test_completions_are_limited_to_what_runs_and_what_may_queue():
    admission = Admission(ServerConfig(max_queued_requests=2), max_running=3)
    tickets = [Ticket(admission) for _ in range(5)]
    assert "3 running and 2 queued" in refused("queue_full", Ticket, admission)
    tickets[0].close()
    tickets[0].close()
    assert admission.load == Load(4, 0)
    last = Ticket(admission)
    refused("queue_full", last.admit, 2, 1)
    last.admit(1, 1)
    for ticket in (*tickets, last):
        ticket.close()
    assert admission.load == Load()


def test_prompt_tokens_wait_until_the_first_token():
    admission = Admission(ServerConfig(max_queued_tokens=10), max_running=3)
    one, two = Ticket(admission), Ticket(admission)
    one.admit(1, 8)
    assert "8 prompt tokens wait and the request has 3; at most 10" in refused("queue_full", two.admit, 1, 3)
    two.admit(1, 2)
    one.release(tokens=8)
    assert admission.load == Load(2, 2)
    one.close()
    assert admission.load == Load(1, 2)


def test_a_request_that_comes_alone_is_never_refused():
    admission = Admission(ServerConfig(max_queued_requests=0, max_queued_tokens=1), max_running=1)
    ticket = Ticket(admission)
    ticket.admit(100, 10_000)
    refused("queue_full", Ticket, admission)
    ticket.close()
    Ticket(admission).close()


def test_the_other_fronts_count():
    admission = Admission(ServerConfig(max_queued_requests=1, max_queued_tokens=10), max_running=1)
    admission.others = Load(2, 0)
    refused("queue_full", Ticket, admission)
    admission.others = Load(1, 9)
    ticket = Ticket(admission)
    refused("queue_full", ticket.admit, 1, 2)


def check_all_is_released(api):
    assert api.state.admission.load == Load()
    assert sorted(api.state.fake.aborted) == sorted(api.state.fake.started)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "missed"), [("never", "queue_timeout"), ("s", "first_token_timeout"), ("st", "request_timeout")]
)
def test_a_missed_deadline_is_answered_and_aborts(stream, prompt, missed):
    api = staged(queue_timeout=0.05, first_token_timeout=0.1, request_timeout=0.15)
    response = api.completion(prompt=prompt, stream=stream)
    if prompt == "st" and stream:
        assert response.status_code == 200
        first, error, done, _ = response.text.split("\n\n")
        assert json.loads(first[6:])["choices"][0]["text"] == "a"
        assert json.loads(error[6:])["error"]["code"] == missed
        assert done == "data: [DONE]"
    else:
        assert response.status_code == 408
        error = response.json()["error"]
        assert (error["code"], error["type"]) == (missed, "timeout_error")
        assert missed in error["message"]
    check_all_is_released(api)
    assert counted(api.state.metrics, "request_refused") == {missed: 1}
    assert counted(api.state.metrics, "request_success") == {"abort": 1}


def test_each_deadline_can_be_off():
    for limits in ({}, {"queue_timeout": 5}, {"first_token_timeout": 5}, {"request_timeout": 5}):
        api = staged(**limits)
        assert api.completion(prompt="go").status_code == 200
        check_all_is_released(api)
    api = staged(first_token_timeout=0.05)
    assert api.completion(prompt="never").json()["error"]["code"] == "first_token_timeout"
    api = staged(queue_timeout=0.05, request_timeout=0.2)  # it starts, so only the last one counts
    assert api.completion(prompt="s").json()["error"]["code"] == "request_timeout"


def test_a_first_token_counts_when_it_is_known_although_it_is_sent_later():
    api = staged(queue_timeout=0.05, first_token_timeout=0.1)
    answer = api.completion(prompt="search", use_beam_search=True, n=1, best_of=4)
    assert (answer.status_code, answer.json()["choices"][0]["text"]) == (200, "b")
    check_all_is_released(api)


def test_beams_and_samples_count_as_completions():
    api = Api(ServerConfig(max_queued_requests=2))  # the fakes run 4 at once

    async def scenario():
        tasks = await in_turn(
            api, [{"prompt": "slow"}, {"prompt": "slow", "best_of": 3}, {"prompt": "x", "best_of": 3, "n": 2}]
        )
        assert [task.done() for task in tasks] == [False, False, True]
        assert tasks[2].result().status_code == 429
        assert api.state.admission.load.completions == 4
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await asyncio.sleep(0.05)

    asyncio.run(scenario())
    check_all_is_released(api)


def test_one_late_prompt_ends_its_request():
    api = staged(queue_timeout=0.05)
    assert api.completion(prompt=["st", "never"]).json()["error"]["code"] == "queue_timeout"
    check_all_is_released(api)


def test_a_body_that_does_not_come_is_not_waited_for():
    api = staged(request_timeout=0.1)

    async def body():
        yield b"{"
        await asyncio.sleep(60)

    response = api.post("/v1/completions", content=body())
    assert (response.status_code, response.json()["error"]["code"]) == (408, "body_timeout")
    check_all_is_released(api)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize"])
def test_a_client_that_leaves_while_it_sends_its_body_holds_no_place(path):
    api, sent = staged(), []

    async def call():
        messages = [{"type": "http.disconnect"}, {"type": "http.request", "body": b"{", "more_body": True}]

        async def receive():
            return messages.pop()

        async def send(message):
            sent.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": b"",
            "query_string": b"",
            "headers": [],
            "asgi": {"spec_version": "2.3"},
        }
        await api.app(scope, receive, send)

    asyncio.run(call())
    assert sent[0]["status"] == 499
    check_all_is_released(api)


async def in_turn(api, bodies):
    """Post the bodies one after the other without waiting for answers; returns tasks."""
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app=api.app), base_url="http://test")
    tasks = []
    for body in bodies:
        tasks.append(asyncio.create_task(client.post("/v1/completions", json=body)))
        await asyncio.sleep(0.02)
    return tasks


def test_surplus_is_refused_at_once_and_the_rest_completes():
    api = Api(ServerConfig(max_queued_requests=2))  # the fakes run 4 at once

    async def scenario():
        tasks = await in_turn(api, [{"prompt": "slow"}] * 10)
        answered = [task for task in tasks if task.done()]
        assert len(answered) == 4
        for task in answered:
            response = task.result()
            assert (response.status_code, response.headers["retry-after"]) == (429, "1")
            error = response.json()["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
        assert len(api.state.fake.started) == 6
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await asyncio.sleep(0.05)

    asyncio.run(scenario())
    check_all_is_released(api)
    assert counted(api.state.metrics, "request_refused") == {"queue_full": 4}
    assert api.completion().status_code == 200


def test_queued_prompt_tokens_are_limited_in_the_app():
    api = staged(max_queued_tokens=12)

    async def scenario():
        tasks = await in_turn(api, [{"prompt": "never and", "max_tokens": 2}, {"prompt": "st"}, {"prompt": "s ever"}])
        assert [task.done() for task in tasks] == [False, False, True]
        assert tasks[2].result().status_code == 429
        assert api.state.admission.load == Load(2, 9)  # the second has its first token
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await asyncio.sleep(0.05)

    asyncio.run(scenario())
    check_all_is_released(api)


def test_nothing_is_read_without_an_engine():
    api = staged()
    api.state.dead = True

    async def body():
        raise AssertionError("the body was read")
        yield b""

    response = api.post("/v1/completions", content=body())
    assert (response.status_code, response.headers["retry-after"]) == (503, "2")
    assert counted(api.state.metrics, "request_refused") == {"engine_unavailable": 1}


def test_refused_bodies_hold_no_place():
    api = staged()
    for _ in range(20):
        assert api.completion(n=10**9).status_code == 400
        assert api.completion(model="gpt-9").status_code == 404
        assert api.post("/v1/completions", content=b"{").status_code == 400
    check_all_is_released(api)


def test_bodies_that_are_not_whole_yet_fill_no_memory(monkeypatch):
    monkeypatch.setattr(module, "BODIES_BYTES", 300)
    api, body = staged(), b" " * 120 + json.dumps({"prompt": "go", "max_tokens": 1}).encode()

    async def half(done):
        yield b" " * 200
        await done.wait()
        yield body

    async def scenario():
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app=api.app), base_url="http://test")
        done = asyncio.Event()
        waiting = asyncio.create_task(client.post("/v1/completions", content=half(done)))
        await asyncio.sleep(0.05)
        refused = await client.post("/v1/completions", content=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert "the server holds 200 bytes of request bodies, and takes 300" in refused.text
        done.set()  # a body that comes alone may be longer
        assert (await waiting).status_code == 200
        assert (await client.post("/v1/completions", content=body)).status_code == 200

    asyncio.run(scenario())
    check_all_is_released(api)


def test_memory_is_given_back_once_for_many_large_bodies(monkeypatch):
    calls = []
    monkeypatch.setattr(request, "give_back_memory", lambda: calls.append(1))
    monkeypatch.setattr(request, "GIVE_BACK_S", 0.1)
    monkeypatch.setattr(request, "LARGE_BODY", 10)
    api = staged()

    async def scenario():
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app=api.app), base_url="http://test")
        for count in (1, 2):
            await asyncio.gather(*(client.post("/v1/completions", json={"prompt": "go"}) for _ in range(3)))
            await asyncio.sleep(0.2)
            assert len(calls) == count

    asyncio.run(scenario())
