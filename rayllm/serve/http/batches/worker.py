"""`BatchWorker`: the part of an API server that works on batches.

It asks the server's own app, in the process, so that a request of a batch is served as one over HTTP is. Requests with
clients that wait go first: those of batches start only while a part of the engines' places is free.

One API server works on a batch, in a term of its own (see `store.py`), which it says twice a second. If it ends, dies
or stands still, another one goes on from the results so far, or the same one after a restart. A batch that others wait
for has a turn, and then waits behind them: what it has asked is answered first, so nothing is computed in vain.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec
from starlette.types import ASGIApp

from rayllm import timeouts
from rayllm.batch.app_client import AppClient
from rayllm.batch.inputs import FileInput
from rayllm.batch.lines import BatchRequest, BatchResult
from rayllm.batch.result_file import NoResultsError, ResultFile
from rayllm.batch.runner import NotSentError, run_batch
from rayllm.serve.http.batches.store import BatchError, BatchErrors, BatchStore, RequestCounts, StoredBatch
from rayllm.serve.http.errors import ApiError
from rayllm.serve.http.request import find_model
from rayllm.serve.http.served import ServedModel, ServerState

LOOK_S = 1.0  # between looks for new batches, and at whether one is to be cancelled
SWEEP_S = 300.0
RETRY_S = 30.0  # before a batch is tried again that could not be worked on
MAX_BATCHES = 4  # at once, of one API server
TURN_S = 300.0  # of a batch, when others wait
IN_FLIGHT = 256  # requests of a batch, those included that wait for a place
SHARE = 0.75  # of what the engines run at once; batches leave the rest to clients that wait
PLACE_S = 0.05  # between looks for a free place
COPY_BYTES = 2**20

End = Literal["completed", "cancelled", "expired"]
_REASONS: dict[End, str] = {
    "cancelled": "the batch was cancelled before this request was answered",
    "expired": "the completion window ended before this request was answered",
}

logger = logging.getLogger(__name__)


class _Model(msgspec.Struct):
    model: str | None = None


_read_model = msgspec.json.Decoder(_Model).decode


class _Turn:
    """The time of a batch with this API server.

    began: when its first request was sent. asked: its requests that are being answered.
    """

    def __init__(self) -> None:
        self.began, self.is_over, self.asked = math.inf, False, 0


class BatchWorker:
    """Works on the batches of a store with the models of a server, and asks its app."""

    def __init__(self, state: ServerState, app: ASGIApp, store: BatchStore):
        self._state, self._app, self._store = state, app, store
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._turns: dict[str, _Turn] = {}  # of those that have a task
        self._retry_at: dict[str, float] = {}  # of those that could not be worked on
        self._queues: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by model: who starts next

    async def run(self) -> None:
        """Take up batches until it is cancelled; those that it has begun stop then, to be taken up by another."""
        loop = asyncio.get_running_loop()
        next_sweep = loop.time()
        try:
            while True:
                try:
                    if loop.time() >= next_sweep:
                        next_sweep = loop.time() + SWEEP_S
                        await asyncio.to_thread(self._store.sweep)
                    self._take_up(await asyncio.to_thread(self._store.waiting), loop.time())
                except Exception:  # the folder is full, or gone
                    logger.exception("batches cannot be looked at")
                await asyncio.sleep(LOOK_S)
        finally:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _take_up(self, waiting: list[str], now: float) -> None:
        """Work on the first ones that wait, and end the turns of as many as wait in vain."""
        self._retry_at = {batch_id: time for batch_id, time in self._retry_at.items() if time > now}
        waiting = [each for each in waiting if each not in self._tasks and each not in self._retry_at]
        free = MAX_BATCHES - len(self._tasks)
        for batch_id in waiting[:free]:
            turn = self._turns[batch_id] = _Turn()
            task = self._tasks[batch_id] = asyncio.create_task(self._work(batch_id, turn))
            task.add_done_callback(partial(self._forget, batch_id))
        ending = sum(turn.is_over for turn in self._turns.values())
        longest = sorted((turn for turn in self._turns.values() if not turn.is_over), key=lambda turn: turn.began)
        for turn in longest[: max(0, len(waiting) - free - ending)]:
            turn.is_over = now - turn.began >= TURN_S

    def _forget(self, batch_id: str, _task: asyncio.Task[None]) -> None:
        del self._tasks[batch_id], self._turns[batch_id]

    async def _work(self, batch_id: str, turn: _Turn) -> None:
        """Bring a batch to its end, unless another server works on it, or its turn is over before."""
        try:
            stored = await asyncio.to_thread(self._store.take, batch_id)
            if stored is not None:
                await self._in_term(stored, turn)
        except Exception:
            logger.exception("batch %s could not be worked on; it is tried again", batch_id)
            self._retry_at[batch_id] = asyncio.get_running_loop().time() + RETRY_S

    async def _in_term(self, stored: StoredBatch, turn: _Turn) -> None:
        """Work on a batch as long as it is this server's, and say so."""
        work, beats = asyncio.create_task(self._finish(stored, turn)), asyncio.create_task(self._beat(stored))
        try:
            await asyncio.wait((work, beats), return_when=asyncio.FIRST_COMPLETED)
            is_ours = await asyncio.to_thread(self._store.is_last, stored)
        finally:
            work.cancel()
            await asyncio.wait((work,))
            beats.cancel()
            await asyncio.wait((beats,))
            await asyncio.to_thread(self._store.release, stored)
        for task in (work, beats):
            if is_ours and not task.cancelled():  # else it has ended, or is another server's
                task.result()

    async def _beat(self, stored: StoredBatch) -> None:
        while await asyncio.to_thread(self._store.beat, stored):
            await asyncio.sleep(timeouts.BATCH_BEAT_S)

    async def _finish(self, stored: StoredBatch, turn: _Turn) -> None:
        """Answer what is not answered yet, and end the batch if its turn lasts so long."""
        batch, store = stored.batch, self._store
        try:
            file = FileInput(await asyncio.to_thread(store.files.content, batch.input_file_id, stored.owner))
            total = await file.count()
            if not total:
                raise ApiError(400, "the input file has no requests", code="empty_file", param="input_file_id")
            results = await asyncio.to_thread(ResultFile, store.results(stored))
        except (ApiError, NoResultsError) as error:
            message = BatchError("broken_results", str(error))
            if isinstance(error, ApiError):
                message = BatchError(error.code or error.kind, error.detail, param=error.param)
            batch.status, batch.failed_at = "failed", int(store.clock())
            batch.errors = BatchErrors([message])
            await asyncio.to_thread(store.end, stored)
            return
        try:
            batch.request_counts = RequestCounts(total, results.counts.completed, results.counts.failed)
            if batch.status == "validating":
                batch.status, batch.in_progress_at = "in_progress", int(store.clock())
            await asyncio.to_thread(store.save, stored)
            end = await self._answer(stored, file, results, turn)
            batch.request_counts = RequestCounts(total, results.counts.completed, results.counts.failed)
        finally:
            await asyncio.to_thread(results.close)
        if end is None:
            return
        batch.status, batch.finalizing_at = "finalizing", int(store.clock())
        await asyncio.to_thread(store.save, stored)
        await asyncio.to_thread(self._make_files, stored)
        batch.status = end
        setattr(batch, f"{end}_at", int(store.clock()))
        await asyncio.to_thread(store.end, stored)

    async def _answer(self, stored: StoredBatch, file: FileInput, results: ResultFile, turn: _Turn) -> End | None:
        """Give each request its result; how the batch has ended, or None if its turn was over before."""
        batch, client = stored.batch, AppClient(self._app, stored.owner or None)

        async def ask(request: BatchRequest) -> tuple[int, bytes]:
            await self._place(request, turn)
            turn.asked += 1
            turn.began = min(turn.began, asyncio.get_running_loop().time())
            try:
                return await client.ask(request)
            finally:
                turn.asked -= 1

        end = await asyncio.to_thread(self._look, stored, results)
        if end == "completed":
            work = run_batch(file.lines(), [batch.endpoint], ask, results, results.counts, IN_FLIGHT)
            task = asyncio.create_task(work)
            try:
                while end == "completed" and not (await asyncio.wait([task], timeout=LOOK_S))[0]:
                    if turn.is_over and not turn.asked:
                        return None
                    end = await asyncio.to_thread(self._look, stored, results)
            finally:
                task.cancel()
                await asyncio.wait([task])
            if not task.cancelled():
                task.result()
                return "completed"

        async def refuse(_request: BatchRequest) -> tuple[int, bytes]:
            raise NotSentError(f"batch_{end}", _REASONS[end])

        await run_batch(file.lines(), [batch.endpoint], refuse, results, results.counts, 1)
        return end

    def _look(self, stored: StoredBatch, results: ResultFile) -> End:
        """Write down how far it is; whether it is to end before all is answered."""
        batch = stored.batch
        batch.request_counts.completed, batch.request_counts.failed = results.counts.completed, results.counts.failed
        self._store.save(stored)
        if (cancelled_at := self._store.cancelled_at(stored)) is not None:
            batch.cancelling_at = cancelled_at
            return "cancelled"
        return "expired" if self._store.clock() >= batch.expires_at else "completed"

    async def _place(self, request: BatchRequest, turn: _Turn) -> None:
        """Return when the request's model has a place for it that no client needs; never after the turn is over."""
        with suppress(ApiError, msgspec.ValidationError):  # the app says that there is no such model, or name
            model = find_model(self._state, _read_model(request.body).model)
            async with self._queues[model.name]:
                while not turn.is_over and _is_busy(model):
                    await asyncio.sleep(PLACE_S)
        if turn.is_over:
            await asyncio.get_running_loop().create_future()  # until it is cancelled

    def _make_files(self, stored: StoredBatch) -> None:
        """Make files of the results."""
        batch, path = stored.batch, self._store.results(stored)
        kinds: tuple[Literal["output", "error"], ...] = ("output", "error")
        for kind in kinds:
            wants = kind == "output"
            if any(True for _line in _lines(path, wants)):
                file_id, name = stored.file_id(kind), f"{batch.id}_{kind}.jsonl"
                lines = _lines(path, wants)
                self._store.files.put(file_id, lines, name, "batch_output", stored.owner, stored.output_ttl)
                setattr(batch, f"{kind}_file_id", file_id)


def _is_busy(model: ServedModel) -> bool:
    admission = model.admission
    live = admission.load.completions + admission.others.completions
    return live >= max(1, int(SHARE * admission.max_running))


def _lines(path: Path, succeeded: bool) -> Iterator[bytes]:
    """The results of requests that succeeded, or of the others."""
    read = msgspec.json.Decoder(BatchResult).decode
    with path.open("rb") as file:
        for line in file:
            if read(line).succeeded == succeeded:
                yield line
