"""Responses that run in the background: polled, followed, cancelled, and taken over from an API server that died."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
import time

import pytest
from support.app import error_of
from support.chat import ScriptedEngine
from support.chat_templates import PLAIN
from support.responses import Conversation, events_of, same, valid

from rayllm import timeouts
from rayllm.api.types import CompletionOutput, RequestOutput
from rayllm.errors import EngineDeadError
from rayllm.serve.http.request_log import LOGGER_NAME
from rayllm.serve.http.responses import background

TEXT = "The quick brown fox jumps over the lazy dog."
BODY = {"model": "org/fake", "input": "hi", "background": True}


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    monkeypatch.setattr(timeouts, "RESPONSE_POLL_S", 0.005)
    monkeypatch.setattr(timeouts, "RESPONSE_BEAT_S", 0.01)


class KeptEngine(ScriptedEngine):
    """Answers each request with the same text, from its beginning, as far as `allowed` characters say.

    step: characters an output. It notes the keys that it was asked with, and how many requests run.
    """

    def __init__(self, text=TEXT, step=4):
        super().__init__(PLAIN, [])
        self.text, self.step, self.allowed, self.fails = text, step, 0, None
        self.keys, self.num_running = [], 0

    async def generate(self, request, prompt_text=None):
        self.keys.append(request.key)
        self.requests.append(request)
        self.num_running += 1
        ids, at = request.prompt_token_ids, 0
        try:
            while at <= len(self.text):
                while at >= self.allowed:
                    await asyncio.sleep(0.001)
                    if self.fails is not None:
                        raise self.fails
                piece = self.text[at : min(at + self.step, self.allowed)]
                at += max(len(piece), 1)
                last = at >= len(self.text)
                part = CompletionOutput(0, piece, [ord(c) for c in piece], finish_reason="stop" if last else None)
                yield RequestOutput(request.request_id, prompt_text, ids, [part], last)
                if last:
                    return
        finally:
            self.num_running -= 1


class Server(Conversation):
    """An API server of a deployment with this store and engine."""

    def __init__(self, folder, engine=None):
        super().__init__(folder=folder, engine=engine or KeptEngine())

    async def kill(self, folder, silent_s=6.0):
        """Its tasks end without a word; as if that was so many seconds ago."""
        self.state.response_store.release = lambda _: None
        await self.state.jobs.close()
        for path in folder.glob("*.run"):
            os.utime(path, (time.time() - silent_s,) * 2)


async def until(condition):
    deadline = time.monotonic() + 10
    while not (found := await condition() if asyncio.iscoroutinefunction(condition) else condition()):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)
    return found


async def status_of(web, path):
    return (await web.get(path)).json()["status"]


async def ended(web, path):
    """The response once it has ended."""

    async def answer():
        response = (await web.get(path)).json()
        return response if response["status"] not in ("queued", "in_progress") else None

    return await until(answer)


def logged_events(server, path):
    found = server.state.response_store.events(path.rpartition("/")[2])
    return len(found.lines) if found else 0


def test_it_goes_on_without_the_connection(tmp_path, caplog):
    server = Server(tmp_path)
    caplog.set_level("INFO", LOGGER_NAME)

    async def use():
        async with server.web() as web:
            made = (await web.post("/v1/responses", json=BODY)).json()
            valid(made)
            assert made["status"] == "queued" and made["output"] == [] and made["background"]
            path = f"/v1/responses/{made['id']}"
            assert server.state.admission.load.completions == 1, "it holds a place"
            server.engine.allowed = 5
            await until(lambda: server.engine.num_running)

            async def runs():
                return await status_of(web, path) == "in_progress"

            await until(runs)
            error = error_of(
                await web.post("/v1/responses", json={"input": "ho", "previous_response_id": made["id"]}), 400
            )
            assert "in_progress" in error["message"]
            server.engine.allowed = 1000
            response = await ended(web, path)
            valid(response)
            await until(lambda: server.state.admission.load.completions == 0)
            return made, response

    made, response = asyncio.run(use())
    assert response["status"] == "completed" and response["output"][0]["content"][0]["text"] == TEXT
    assert (made["id"], made["created_at"]) == (response["id"], response["created_at"])
    events = [(record.message, record.fields["reply_id"]) for record in caplog.records if record.fields.get("prompts")]
    assert events == [("start", made["id"]), ("end", made["id"])]
    assert not list(tmp_path.glob("*.run"))
    assert server.engine.keys[0].id == f"{made['id']}-0"
    assert server.engine.forgotten == [f"{made['id']}-0"], "the engine need not keep it any more"


def test_it_is_the_same_as_in_the_foreground(tmp_path):
    server = Server(tmp_path)
    server.engine.allowed = 1000

    async def use():
        async with server.web() as web:
            made = (await web.post("/v1/responses", json=BODY)).json()
            return await ended(web, f"/v1/responses/{made['id']}")

    response = asyncio.run(use())
    foreground = server.post(input="hi", model="org/fake").json()
    assert same(response) | {"background": False} == same(foreground)


def test_its_stream_can_be_followed_from_anywhere(tmp_path):
    engine = KeptEngine()
    server, other = Server(tmp_path, engine), Server(tmp_path, engine)

    async def use():
        async with server.web() as web, other.web() as elsewhere:
            posted = asyncio.create_task(web.post("/v1/responses", json=BODY | {"stream": True}))
            await until(lambda: list(tmp_path.glob("*.events")))
            path = f"/v1/responses/{next(tmp_path.glob('*.events')).stem}"
            engine.allowed = 10
            await until(lambda: logged_events(server, path) > 6)
            resumed = asyncio.create_task(elsewhere.get(f"{path}?stream=true&starting_after=4"))
            await asyncio.sleep(0.05)
            engine.allowed = 1000
            answers = [await posted, await resumed, await web.get(f"{path}?stream=true")]
            return [events_of(answer.text) for answer in answers], (await web.get(path)).json()

    (whole, resumed, again), response = asyncio.run(use())
    kinds = [event["type"] for event in whole]
    assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
    assert whole[-1] == {"type": "response.completed", "sequence_number": len(whole) - 1, "response": response}
    assert whole == again and resumed == whole[5:]
    assert "".join(event["delta"] for event in whole if "delta" in event) == TEXT


def test_a_client_that_leaves_does_not_end_it(tmp_path):
    server = Server(tmp_path)

    async def use():
        async with server.web() as web:
            posted = asyncio.create_task(web.post("/v1/responses", json=BODY | {"stream": True}))
            await until(lambda: list(tmp_path.glob("*.events")))
            posted.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await posted
            (log,) = tmp_path.glob("*.events")
            server.engine.allowed = 1000
            return await ended(web, f"/v1/responses/{log.stem}")

    assert asyncio.run(use())["status"] == "completed"


@pytest.mark.parametrize("stream", [False, True])
def test_cancel(tmp_path, stream):
    engine = KeptEngine()
    server, other = Server(tmp_path, engine), Server(tmp_path, engine)

    async def use():
        async with server.web() as web, other.web() as elsewhere:
            posted = asyncio.create_task(web.post("/v1/responses", json=BODY | {"stream": stream}))
            await until(lambda: list(tmp_path.glob("*.json")))
            path = f"/v1/responses/{next(tmp_path.glob('*.json')).stem}"
            engine.allowed = 10
            await until(lambda: engine.num_running)
            answer = await elsewhere.post(f"{path}/cancel")
            response = answer.json()
            await until(lambda: not engine.num_running)
            assert (await web.post(f"{path}/cancel")).json() == response, "again it changes nothing"
            assert (await web.get(path)).json() == response
            assert server.state.admission.load.completions == 0
            assert len(engine.forgotten) == 1, "else the engine would go on with it"
            return response, (await posted).text

    response, text = asyncio.run(use())
    valid(response)
    assert response["status"] == "cancelled"
    if stream:
        events = events_of(text)
        assert events[-1]["type"] == "response.incomplete" and events[-1]["response"] == response


def test_delete_ends_it(tmp_path):
    server = Server(tmp_path)

    async def use():
        async with server.web() as web:
            posted = asyncio.create_task(web.post("/v1/responses", json=BODY | {"stream": True}))
            await until(lambda: list(tmp_path.glob("*.events")))
            path = f"/v1/responses/{next(tmp_path.glob('*.events')).stem}"
            await until(lambda: server.engine.num_running)
            assert (await web.delete(path)).status_code == 200
            await until(lambda: not server.engine.num_running)
            assert (await web.get(path)).status_code == 404
            return events_of((await posted).text)

    events = asyncio.run(use())
    assert events[-1]["type"] == "error" and events[-1]["code"] == "response_not_found"
    assert {path.name for path in tmp_path.iterdir()} == {".lock"}


@pytest.mark.parametrize("stream", [False, True])
def test_failure(tmp_path, stream):
    server = Server(tmp_path)
    server.engine.fails = EngineDeadError("it is gone")

    async def use():
        async with server.web() as web:
            posted = await web.post("/v1/responses", json=BODY | {"stream": stream})
            path = f"/v1/responses/{next(tmp_path.glob('*.json')).stem}"
            return await ended(web, path), posted.text

    response, text = asyncio.run(use())
    valid(response)
    assert response["status"] == "failed" and "it is gone" in response["error"]["message"]
    if stream:
        assert events_of(text)[-1]["response"] == response


def test_what_cannot_run_is_refused_at_once(tmp_path):
    server = Server(tmp_path)
    assert error_of(server.post(**BODY | {"input": "x" * 200_000}), 400)["code"] == "context_length_exceeded"
    assert server.state.admission.load.completions == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("is_killed", "made"), [(False, 0), (True, 0), (False, 10), (True, 10), (True, 1000)])
def test_another_api_server_takes_it_over(tmp_path, stream, is_killed, made):
    engine = KeptEngine(step=4)
    server, other = Server(tmp_path, engine), Server(tmp_path, engine)
    if made == 1000:
        server.state.response_store.finish = lambda *_: False  # it dies before it has said that it is done

    async def use():
        async with server.web() as web, other.web() as elsewhere:
            posted = asyncio.create_task(web.post("/v1/responses", json=BODY | {"stream": stream}))
            await until(lambda: list(tmp_path.glob("*.json")))
            path = f"/v1/responses/{next(tmp_path.glob('*.json')).stem}"
            await until(lambda: engine.num_running)
            engine.allowed = made
            if made == 1000:
                await until(lambda: not engine.num_running)
            elif stream and made:
                await until(lambda: logged_events(server, path) > 6)
            await (server.kill(tmp_path) if is_killed else server.state.jobs.close())
            posted.cancel()
            assert not engine.num_running
            before = server.state.response_store.events(path.rpartition("/")[2])
            engine.step, engine.allowed = 7, 1000
            assert (await elsewhere.get(path)).status_code == 200
            response = await ended(elsewhere, path)
            events = events_of((await elsewhere.get(f"{path}?stream=true")).text) if stream else []
            await until(lambda: other.state.admission.load.completions == 0)
            return response, events, before

    response, events, before = asyncio.run(use())
    assert response["status"] == "completed", response["error"]
    assert response["output"][0]["content"][0]["text"] == TEXT
    assert len({key.id for key in engine.keys}) == len({key.fingerprint for key in engine.keys}) == 1
    assert {key.created for key in engine.keys} == {response["created_at"]}
    assert len(engine.keys) == 2
    if stream:
        assert "".join(event["delta"] for event in events if "delta" in event) == TEXT
        kinds = [event["type"] for event in events if "delta" not in event]
        assert len(kinds) == len(set(kinds)), "nothing is said twice"
        assert events[-1]["response"] == response
        assert len(events) >= len(before.lines)


@pytest.mark.parametrize("dies", [False, True])
def test_who_finds_the_response_ended_finds_its_text(tmp_path, dies):
    """Also before its last event is written, and if it never is."""
    server = Server(tmp_path)
    store = server.state.response_store
    log = store.log

    def log_late(response_id, events):
        if b"output_text.done" in events or b"response.completed" in events:
            time.sleep(0.1)
        if dies and b"response.completed" in events:
            raise OSError("no space left")
        log(response_id, events)

    store.log = log_late

    async def use():
        async with server.web() as web:
            posted = asyncio.create_task(web.post("/v1/responses", json=BODY | {"stream": True}))
            await until(lambda: list(tmp_path.glob("*.events")))
            path = f"/v1/responses/{next(tmp_path.glob('*.events')).stem}"
            server.engine.allowed = 1000
            response = await ended(web, path)
            events = events_of((await web.get(f"{path}?stream=true")).text)
            posted.cancel()
            return response, events

    response, events = asyncio.run(use())
    assert "".join(event["delta"] for event in events if "delta" in event) == TEXT
    assert events[-1]["type"] == "response.completed" and events[-1]["response"] == response
    numbers = [event["sequence_number"] for event in events]
    assert numbers == list(range(len(numbers)))


def test_who_follows_a_stream_takes_it_over(tmp_path):
    engine = KeptEngine()
    server, other = Server(tmp_path, engine), Server(tmp_path, engine)

    async def use():
        async with server.web() as web, other.web() as elsewhere:
            posted = asyncio.create_task(web.post("/v1/responses", json=BODY | {"stream": True}))
            await until(lambda: list(tmp_path.glob("*.events")))
            path = f"/v1/responses/{next(tmp_path.glob('*.events')).stem}"
            engine.allowed = 10
            await until(lambda: logged_events(server, path) > 6)
            following = asyncio.create_task(elsewhere.get(f"{path}?stream=true&starting_after=2"))
            await asyncio.sleep(0.05)
            await server.kill(tmp_path)
            posted.cancel()
            engine.allowed = 1000
            return events_of((await following).text)

    events = asyncio.run(use())
    assert events[0]["sequence_number"] == 3 and events[-1]["type"] == "response.completed"
    assert "".join(event["delta"] for event in events if "delta" in event) == TEXT


def test_too_late(tmp_path):
    server, other = Server(tmp_path), Server(tmp_path)

    async def use():
        async with server.web() as web, other.web() as elsewhere:
            posted = asyncio.create_task(web.post("/v1/responses", json=BODY | {"stream": True}))
            await until(lambda: list(tmp_path.glob("*.events")))
            path = f"/v1/responses/{next(tmp_path.glob('*.events')).stem}"
            await server.kill(tmp_path, silent_s=100)
            posted.cancel()
            response = (await elsewhere.get(path)).json()
            return response, events_of((await elsewhere.get(f"{path}?stream=true")).text)

    response, events = asyncio.run(use())
    assert response["status"] == "failed" and "was lost" in response["error"]["message"]
    assert events[-1]["type"] == "response.failed" and events[-1]["response"] == response
    assert not other.engine.keys


def test_what_comes_out_differently_has_failed(tmp_path):
    server, other = Server(tmp_path), Server(tmp_path, KeptEngine(text="Another text, of another engine."))

    async def use():
        async with server.web() as web, other.web() as elsewhere:
            posted = asyncio.create_task(web.post("/v1/responses", json=BODY | {"stream": True}))
            await until(lambda: list(tmp_path.glob("*.events")))
            path = f"/v1/responses/{next(tmp_path.glob('*.events')).stem}"
            server.engine.allowed = 10
            await until(lambda: logged_events(server, path) > 6)
            await server.kill(tmp_path)
            posted.cancel()
            other.engine.allowed = 1000
            return await ended(elsewhere, path), events_of((await elsewhere.get(f"{path}?stream=true")).text)

    response, events = asyncio.run(use())
    assert response["status"] == "failed" and "differently" in response["error"]["message"]
    assert events[-1]["type"] == "response.failed"
    assert "Another" not in "".join(event.get("delta", "") for event in events)


def test_a_cancelled_one_is_not_taken_over(tmp_path):
    server, other = Server(tmp_path), Server(tmp_path)

    async def use():
        async with server.web() as web, other.web() as elsewhere:
            made = (await web.post("/v1/responses", json=BODY)).json()
            await server.kill(tmp_path)
            return (await elsewhere.post(f"/v1/responses/{made['id']}/cancel")).json()

    assert asyncio.run(use())["status"] == "cancelled"
    assert not other.engine.keys


def test_an_engine_that_is_not_there_is_waited_for(tmp_path):
    engine = KeptEngine()
    server, other = Server(tmp_path, engine), Server(tmp_path, engine)

    async def use():
        async with server.web() as web, other.web() as elsewhere:
            made = (await web.post("/v1/responses", json=BODY)).json()
            await server.kill(tmp_path)
            other.state.dead = True
            path = f"/v1/responses/{made['id']}"
            assert await status_of(elsewhere, path) == "queued"
            assert other.state.admission.load.completions == 0
            other.state.dead, engine.allowed = False, 1000
            return await ended(elsewhere, path)

    assert asyncio.run(use())["status"] == "completed"


def test_a_request_that_is_sent_again_runs_once(tmp_path):
    server = Server(tmp_path)
    server.engine.allowed = 1000

    async def use():
        async with server.web() as web:
            header = {"idempotency-key": "a"}
            first = (await web.post("/v1/responses", json=BODY, headers=header)).json()
            await ended(web, f"/v1/responses/{first['id']}")
            second = (await web.post("/v1/responses", json=BODY, headers=header)).json()
            other = await web.post("/v1/responses", json=BODY | {"input": "ho"}, headers=header)
            return first, second, other

    first, second, other = asyncio.run(use())
    assert first["id"] == second["id"] and second["status"] == "completed"
    assert len(server.engine.keys) == 1
    assert error_of(other, 422)["code"] == "idempotency_key_reused"


def sequence_numbers(text):
    return [json.loads(line[6:])["sequence_number"] for line in text.split("\n") if line.startswith("data: ")]


def test_events_that_come_while_others_are_written_are_logged_once(tmp_path, monkeypatch):
    server = Server(tmp_path)
    server.engine.allowed = 1000
    waiting, making, taken = threading.Event(), threading.Event(), threading.Event()
    write, events, outputs = background._Run._write, background.ResponseReply.events, server.engine.generate

    def write_late(self, *new):  # as a thread may be that is scheduled late
        if (self._new or any(new)) and not taken.is_set():
            waiting.set()
            making.wait(5)
        result = write(self, *new)
        if waiting.is_set():
            taken.set()
        return result

    def events_meanwhile(self, *arguments):
        if waiting.is_set() and not taken.is_set():
            making.set()
            taken.wait(5)
        return events(self, *arguments)

    async def slowly(*arguments):
        async for output in outputs(*arguments):
            await asyncio.sleep(0.01)
            yield output

    monkeypatch.setattr(background._Run, "_write", write_late)
    monkeypatch.setattr(background.ResponseReply, "events", events_meanwhile)
    server.engine.generate = slowly

    async def use():
        async with server.web() as web:
            return (await web.post("/v1/responses", json=BODY | {"stream": True})).text

    numbers = sequence_numbers(asyncio.run(use()))
    assert taken.is_set()
    assert numbers == list(range(len(numbers)))


def test_the_same_key_twice_at_once_is_one_response(tmp_path):
    server = Server(tmp_path)
    server.engine.allowed = 1000

    async def use():
        async with server.web() as web:
            headers = {"idempotency-key": "same"}
            calls = (web.post("/v1/responses", json=BODY | {"stream": True}, headers=headers) for _ in range(2))
            return [answer.text for answer in await asyncio.gather(*calls)]

    for text in asyncio.run(use()):
        numbers = sequence_numbers(text)
        assert numbers == list(range(len(numbers)))
