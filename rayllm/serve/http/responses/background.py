"""Responses that run without a connection, and streams of their events.

The API server that runs one says so in the store twice a second. If it falls silent, the one that is asked for the
response next takes it over: it sends the engine the same request with the same key, by which the engine finds what it
has of it, and goes on with it. An engine keeps that for KEEP_S only; a response that is silent for longer has failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Sequence
from typing import Literal

import msgspec
import orjson

from rayllm import timeouts
from rayllm.api.types import IdempotencyKey
from rayllm.errors import EngineDeadError, InvalidRequestError
from rayllm.serve.http.convert import Job
from rayllm.serve.http.errors import ApiError
from rayllm.serve.http.replies import sse
from rayllm.serve.http.request import RequestContext, RequestGroup
from rayllm.serve.http.request_log import log_event
from rayllm.serve.http.responses.convert import response_job
from rayllm.serve.http.responses.protocol import Json, ResponseBody
from rayllm.serve.http.responses.reply import ENDS, ResponseReply, lines
from rayllm.serve.http.responses.store import ResponseStore, StoredResponse
from rayllm.serve.http.served import Target

TAKE_OVER_S = timeouts.KEEP_S - timeouts.RESPONSE_SILENCE_S  # after which the engine may have forgotten it

_LOST = "the API server that ran this response was lost, and nobody asked for it in time to take it over"
_CHANGED = "the API server that ran this response was lost, and computed again it came out differently"

logger = logging.getLogger(__name__)


async def start(
    context: RequestContext, body: ResponseBody, items: list[Json], job: Job, target: Target
) -> StoredResponse:
    """Run a response in the background, in the place that the request holds. Returns it as it is stored: queued, or as
    another request with the same key has begun it meanwhile.

    target: with a key. Raises OSError if it cannot be stored, EngineDeadError if this API server is about to end.
    """
    assert target.key is not None
    if context.state.jobs.is_closed:
        raise EngineDeadError("the API server is shutting down")
    reply = ResponseReply(body, job, target, len(items))
    events = reply.queue() if body.stream else []
    raw = msgspec.Raw(body.model_dump_json(by_alias=True, exclude_unset=True).encode())
    stored = StoredResponse(context.record.key or "", reply.response(), items, raw, target.key.fingerprint)
    store = context.state.response_store
    if not await asyncio.to_thread(store.begin, stored, lines(events)):  # the same request came at the same time
        return await asyncio.to_thread(store.read, target.reply_id, stored.owner) or stored
    run = _Run(context.detach(), job, reply, msgspec.structs.replace(stored), None)
    context.state.jobs.start(run.run())
    return stored


async def take_over(context: RequestContext, stored: StoredResponse) -> StoredResponse:
    """The response as it is now, once this API server runs it if nobody else does, or has given it up."""
    store, response_id = context.state.response_store, stored.response["id"]
    if stored.has_ended or context.state.jobs.is_closed:
        return stored
    if (silence := await asyncio.to_thread(store.silence, response_id)) <= timeouts.RESPONSE_SILENCE_S:
        return stored
    if await asyncio.to_thread(store.is_cancelled, response_id):
        await asyncio.to_thread(_end, store, stored, "cancelled", None)
    elif silence > TAKE_OVER_S:
        await asyncio.to_thread(_end, store, stored, "failed", _LOST)
    else:
        try:
            await _go_on(context, stored)
        except (EngineDeadError, ApiError) as error:  # another try is made when somebody asks again
            logger.warning("%s cannot be taken over now: %s", response_id, error)
        except InvalidRequestError as error:  # the model is another one by now
            await asyncio.to_thread(_end, store, stored, "failed", f"it cannot go on: {error}")
    return await asyncio.to_thread(store.read, response_id, stored.owner) or stored


async def _go_on(context: RequestContext, stored: StoredResponse) -> None:
    """Run what another API server has run. Raises ApiError, EngineDeadError if there is no place for it now."""
    store, response = context.state.response_store, stored.response
    own = context.detach()
    with contextlib.ExitStack() as undo:
        undo.callback(own.holds.close)
        own.take_place()
        body = ResponseBody.model_validate_json(bytes(stored.body))
        key = IdempotencyKey(response["id"], stored.fingerprint, response["created_at"])
        target = own.enter(body.model, "resp_", again=key)
        job = await asyncio.to_thread(response_job, body, stored.input, target)
        if not await asyncio.to_thread(store.claim, response["id"], lost_s=timeouts.RESPONSE_SILENCE_S):
            return
        logged = [orjson.loads(line) for line in await asyncio.to_thread(store.cut_log, response["id"])]
        reply = ResponseReply(body, job, target, len(stored.input))
        run = _Run(own, job, reply, stored, _Seen(logged) if body.stream else None)
        undo.pop_all()
        context.state.jobs.start(run.run())


def _end(store: ResponseStore, stored: StoredResponse, status: Literal["cancelled", "failed"], why: str | None) -> None:
    """End what nobody runs."""
    response = stored.response
    if not store.claim(response["id"], lost_s=timeouts.RESPONSE_SILENCE_S):
        return
    error = why and {"code": "server_error", "message": why}
    ended = msgspec.structs.replace(stored, response=response | {"status": status, "error": error})
    last = b""
    if logged := store.cut_log(response["id"]):
        last = lines([_last_event(ended, orjson.loads(logged[-1])["sequence_number"] + 1)])
    store.finish(ended, last=last)


def _last_event(stored: StoredResponse, number: int) -> Json:
    """Of a response that has ended. Events know no status "cancelled"."""
    status = stored.response["status"]
    kind = "response.incomplete" if status == "cancelled" else f"response.{status}"
    return {"type": kind, "sequence_number": number, "response": stored.response}


class _Run:
    """One response that this API server runs. seen: what its log has already; None if it has just begun."""

    def __init__(
        self, context: RequestContext, job: Job, reply: ResponseReply, stored: StoredResponse, seen: _Seen | None
    ):
        self._context, self._job, self._reply = context, job, reply
        self._stored, self._seen = stored, seen
        self._id: str = stored.response["id"]
        self._store = context.state.response_store
        self._new: list[Json] = []  # events that are to be written
        self._is_streamed = bool(reply.stream)
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Until it has ended, was cancelled, or another API server has it."""
        record = self._context.record
        try:
            with self._context.holds:
                await self._run()
        except asyncio.CancelledError:  # this API server ends
            record.error = "server_stopped"
            self._store.release(self._id)
            raise
        except Exception as error:  # of the store, as all else is answered for
            self._context.failed(error)
        finally:
            record.total = time.perf_counter() - record.clock
            if record.started:
                log_event("abort" if record.error else "end", record)

    async def _run(self) -> None:
        work = asyncio.create_task(self._work())
        watch = asyncio.create_task(self._watch())
        try:
            await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
        finally:
            is_done = work.done()
            work.cancel()
            self._stop.set()  # and not cancelled, as a thread may be writing for it
            await asyncio.gather(work, watch, return_exceptions=True)
        if not is_done:
            self._context.record.error = watch.result()  # which raises what the store did
            if watch.result() == "cancelled":
                await self._finish(self._reply.cancel())
            return
        try:
            work.result()
            last = self._unseen(self._reply.end())
        except Exception as error:
            last = self._reply.fail(self._context.failed(error))
            if self._seen is not None:
                last = self._seen.numbered(last)
        await self._finish(last)

    async def _work(self) -> None:
        self._context.start(self._job, stream=self._is_streamed)
        group = RequestGroup(self._context, self._job)
        while outputs := await group.next():
            for _, output in outputs:
                new = self._unseen(self._reply.begin() + self._reply.events(output))
                self._new += new

    def _unseen(self, events: list[Json]) -> list[Json]:
        """Those of the events that the log has not, if there is a log."""
        if not self._is_streamed:
            return []
        return events if self._seen is None else self._seen.rest(events)

    async def _watch(self) -> str | None:
        """Write what is new, and say that it runs, until told to stop.

        Returns why the response is to end: "cancelled", or "lost" to another API server.
        """
        next_beat = 0.0
        while not self._stop.is_set():
            if self._new or time.monotonic() >= next_beat:
                next_beat = time.monotonic() + timeouts.RESPONSE_BEAT_S
                new, self._new = self._new, []  # here, not in the thread, while which more may come
                if (why := await asyncio.to_thread(self._write, new)) is not None:
                    return why
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), timeouts.RESPONSE_POLL_S)
        return None

    def _write(self, new: Sequence[Json]) -> str | None:
        if not self._store.beat(self._id):
            return "lost"
        if new:
            self._store.log(self._id, lines(new))
        if self._reply.status != self._stored.response["status"]:
            self._stored.response = self._stored.response | {"status": self._reply.status}
            self._store.write(self._stored)
        return "cancelled" if self._store.is_cancelled(self._id) else None

    async def _finish(self, last: Sequence[Json]) -> None:
        """Store the end; the engine need not keep the tokens any more."""
        self._stored.response = self._reply.response()
        new = [*self._new, *last] if self._is_streamed else []
        await asyncio.to_thread(self._store.finish, self._stored, lines(new[:-1]), lines(new[-1:]))
        for request in self._job.requests:  # the store has all that came of it
            if request.key is not None:
                self._context.target.engine.forget(request.key.id)


class _Seen:
    """Leaves out of a stream that begins anew what a log has of it; its pieces of text may be cut differently."""

    def __init__(self, logged: Sequence[Json]):
        self._next = logged[-1]["sequence_number"] + 1 if logged else 0
        self._whole = {(event["type"], event.get("output_index")) for event in logged if "delta" not in event}
        self._texts: dict[tuple[str, int], str] = {}  # what is still to come again of each text
        self._logprobs: dict[int, int] = {}  # of how many tokens the log has them, by item
        for event in logged:
            if "delta" in event:
                place = event["type"], event["output_index"]
                self._texts[place] = self._texts.get(place, "") + event["delta"]
                tokens = len(event.get("logprobs", ()))
                self._logprobs[place[1]] = self._logprobs.get(place[1], 0) + tokens

    def rest(self, events: Sequence[Json]) -> list[Json]:
        """What is new in the next events of the stream, numbered as the log goes on.

        Raises ApiError if it is another stream than the log's.
        """
        found = []
        for event in events:
            place = event["type"], event.get("output_index")
            if "delta" in event:
                event, is_new = self._rest_of_text(event)
            else:
                is_new = place not in self._whole
            if is_new:
                if any(self._texts.values()):
                    raise ApiError(500, _CHANGED)
                found.append(event)
        return self.numbered(found)

    def _rest_of_text(self, event: Json) -> tuple[Json, bool]:
        place, delta = (event["type"], event["output_index"]), event["delta"]
        before = self._texts.get(place, "")
        common = min(len(before), len(delta))
        if before[:common] != delta[:common]:
            raise ApiError(500, _CHANGED)
        self._texts[place] = before[common:]
        event = event | {"delta": delta[common:]}
        if tokens := event.get("logprobs"):
            known = min(self._logprobs.get(place[1], 0), len(tokens))
            self._logprobs[place[1]] = self._logprobs.get(place[1], 0) - known
            event["logprobs"] = tokens[known:]
        return event, bool(event["delta"]) or not common

    def numbered(self, events: Sequence[Json]) -> list[Json]:
        """Events that the log goes on with."""
        first, self._next = self._next, self._next + len(events)
        return [event | {"sequence_number": first + index} for index, event in enumerate(events)]


async def follow(context: RequestContext, stored: StoredResponse, after: int) -> AsyncIterator[bytes]:
    """The events of a response that was asked for with `background` and `stream`, as they come.

    after: the number of the last one that the client has, or -1.
    """
    store, response_id, owner = context.state.response_store, stored.response["id"], stored.owner
    offset, last, next_look, has_ended = 0, -1, 0.0, False
    while True:
        found = await asyncio.to_thread(store.events, response_id, offset)
        if found is None:
            yield _gone(response_id, last + 1)
            return
        offset, events = found.offset, [orjson.loads(line) for line in found.lines]
        if has_ended and not events:  # the last one is about to be written, or never was: it follows from the response
            events = [_last_event(stored, last + 1)]
        last = events[-1]["sequence_number"] if events else last
        if frames := b"".join(sse(event, event["type"]) for event in events if event["sequence_number"] > after):
            yield frames
        if events and events[-1]["type"] in ENDS:
            return
        if events:
            has_ended = False
        elif time.monotonic() >= next_look:
            next_look = time.monotonic() + timeouts.RESPONSE_BEAT_S
            now = await asyncio.to_thread(store.read, response_id, owner)
            if now is None:
                yield _gone(response_id, last + 1)
                return
            stored = await take_over(context, now)
            if has_ended := stored.has_ended:
                continue
        await asyncio.sleep(timeouts.RESPONSE_POLL_S)


def _gone(response_id: str, number: int) -> bytes:
    """The event of a stream whose response was deleted."""
    message = f"the response {response_id} was deleted"
    event = {"type": "error", "code": "response_not_found", "message": message, "param": None}
    return sse(event | {"sequence_number": number}, "error")


async def cancel(context: RequestContext, stored: StoredResponse) -> StoredResponse:
    """End a response that runs in the background, whichever API server runs it; how it is then."""
    store, response_id = context.state.response_store, stored.response["id"]
    if stored.has_ended:
        return stored
    await asyncio.to_thread(store.cancel, response_id)
    deadline = time.monotonic() + timeouts.RESPONSE_CANCEL_S
    while not stored.has_ended and time.monotonic() < deadline:
        await asyncio.sleep(timeouts.RESPONSE_POLL_S)
        now = await asyncio.to_thread(store.read, response_id, stored.owner)
        if now is None:
            break
        stored = await take_over(context, now)
    return stored
