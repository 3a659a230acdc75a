"""`BatchWorker`: the part of an API server that works on batches.

It asks the server's own app, in the process, so that a request of a batch is served as one over HTTP is. Requests with
clients that wait go first: those of batches start only while a part of the engines' places is free.

One API server works on a batch, as long as it has the batch's `ResultFile` open. If it ends or dies, another one goes
on from the results so far, or the same one after a restart.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec
from starlette.types import ASGIApp

from rayllm.batch.app_client import AppClient
from rayllm.batch.inputs import FileInput
from rayllm.batch.lines import BatchRequest, BatchResult
from rayllm.batch.result_file import InUseError, ResultFile
from rayllm.batch.runner import NotSentError, run_batch
from rayllm.serve.http.batches.store import BatchError, BatchErrors, BatchStore, RequestCounts, StoredBatch
from rayllm.serve.http.errors import ApiError
from rayllm.serve.http.request import find_model
from rayllm.serve.http.served import ServedModel, ServerState

LOOK_S = 1.0  # between looks for new batches, and at whether one is to be cancelled
SWEEP_S = 300.0
RETRY_S = 30.0  # before a batch is tried again that could not be worked on
MAX_BATCHES = 4  # at once, of one API server
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


class BatchWorker:
    """Works on the batches of a store with the models of a server, and asks its app."""

    def __init__(self, state: ServerState, app: ASGIApp, store: BatchStore):
        self._state, self._app, self._store = state, app, store
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ended: set[str] = set()
        self._turns: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by model: who starts next

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
                    self._take_up(await asyncio.to_thread(self._waiting))
                except Exception:  # the folder is full, or gone
                    logger.exception("batches cannot be looked at")
                await asyncio.sleep(LOOK_S)
        finally:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _take_up(self, batch_ids: list[str]) -> None:
        for batch_id in batch_ids:
            if len(self._tasks) < MAX_BATCHES and batch_id not in self._tasks:
                task = self._tasks[batch_id] = asyncio.create_task(self._work(batch_id))
                task.add_done_callback(partial(self._forget, batch_id))

    def _forget(self, batch_id: str, _task: asyncio.Task[None]) -> None:
        del self._tasks[batch_id]

    def _waiting(self) -> list[str]:
        """Batches that have not ended, the oldest first."""
        ids = self._store.ids()
        self._ended &= set(ids)
        found = []
        for batch_id in ids:
            stored = None if batch_id in self._ended else self._store.load(batch_id)
            if stored is not None and stored.batch.has_ended:
                self._ended.add(batch_id)
            elif stored is not None:
                found.append((stored.batch.created_at, batch_id))
        return [batch_id for _created, batch_id in sorted(found)]

    async def _work(self, batch_id: str) -> None:
        """Bring a batch to its end, unless another server works on it."""
        try:
            results = await asyncio.to_thread(ResultFile, self._store.results(batch_id))
            try:
                stored = await asyncio.to_thread(self._store.load, batch_id)
                if stored is not None and not stored.batch.has_ended:
                    await self._finish(stored, results)
            finally:
                await asyncio.to_thread(results.close)
        except InUseError:
            pass
        except Exception:
            logger.exception("batch %s could not be worked on; it is tried again", batch_id)
            await asyncio.sleep(RETRY_S)

    async def _finish(self, stored: StoredBatch, results: ResultFile) -> None:
        batch, store = stored.batch, self._store
        try:
            file = FileInput(await asyncio.to_thread(store.files.content, batch.input_file_id, stored.owner))
            total = await file.count()
            if not total:
                raise ApiError(400, "the input file has no requests", code="empty_file", param="input_file_id")
        except ApiError as error:
            message = BatchError(error.code or error.kind, error.detail, param=error.param)
            batch.status, batch.failed_at = "failed", int(store.clock())
            batch.errors = BatchErrors([message])
            await asyncio.to_thread(store.save, stored)
            return
        batch.request_counts = RequestCounts(total, results.counts.completed, results.counts.failed)
        if batch.status == "validating":
            batch.status, batch.in_progress_at = "in_progress", int(store.clock())
        await asyncio.to_thread(store.save, stored)
        end = await self._answer(stored, file, results)
        batch.status, batch.finalizing_at = "finalizing", int(store.clock())
        batch.request_counts = RequestCounts(total, results.counts.completed, results.counts.failed)
        await asyncio.to_thread(store.save, stored)
        await asyncio.to_thread(self._hand_over, stored)
        batch.status = end
        setattr(batch, f"{end}_at", int(store.clock()))
        await asyncio.to_thread(store.save, stored)
        store.results(batch.id).unlink(missing_ok=True)

    async def _answer(self, stored: StoredBatch, file: FileInput, results: ResultFile) -> End:
        """Give each request its result; how the batch has ended."""
        batch, client = stored.batch, AppClient(self._app, stored.owner or None)

        async def ask(request: BatchRequest) -> tuple[int, bytes]:
            await self._place(request)
            return await client.ask(request)

        end = await asyncio.to_thread(self._look, stored, results)
        if end == "completed":
            work = run_batch(file.lines(), [batch.endpoint], ask, results, results.counts, IN_FLIGHT)
            task = asyncio.create_task(work)
            try:
                while end == "completed" and not (await asyncio.wait([task], timeout=LOOK_S))[0]:
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
        batch, now = stored.batch, self._store.load(stored.batch.id)
        batch.request_counts.completed, batch.request_counts.failed = results.counts.completed, results.counts.failed
        if now is not None and now.batch.status == "cancelling":
            batch.cancelling_at = now.batch.cancelling_at
            return "cancelled"
        self._store.save(stored)
        return "expired" if self._store.clock() >= batch.expires_at else "completed"

    async def _place(self, request: BatchRequest) -> None:
        """Return when the request's model has a place for it that no client needs."""
        with suppress(ApiError):  # the app says that there is no such model
            model = find_model(self._state, _read_model(request.body).model)
            async with self._turns[model.name]:
                while _is_busy(model):
                    await asyncio.sleep(PLACE_S)

    def _hand_over(self, stored: StoredBatch) -> None:
        """Make files of the results, under ids that are the same if it is done again."""
        batch, files = stored.batch, self._store.files
        path = self._store.results(batch.id)
        for kind in ("output", "error"):
            wants = kind == "output"
            if any(True for _line in _lines(path, wants)):
                file_id = "file-" + hashlib.sha256(f"{batch.id} {kind}".encode()).hexdigest()[:32]
                name = f"{batch.id}_{kind}.jsonl"
                files.put(file_id, _lines(path, wants), name, "batch_output", stored.owner, stored.output_ttl)
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
