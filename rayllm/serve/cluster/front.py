"""`ModelFront`: one model as an API server serves it: its replicas, and which of them gets a request.

It is the `Engine` that the routes use: `generate` sends a request to the replica that `router.py` chooses. A replica
that drains, or that Serve does not count any more, gets no new requests; when this server's last one there is done, the
connection is closed, by which the replica knows that it may end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec

from rayllm.api.types import EngineInfo, EngineStats, GenerationRequest, RequestOutput
from rayllm.config.options import ServerConfig
from rayllm.errors import EngineDeadError
from rayllm.serve.cluster.replica import FrontReport, ReplicaReport, node_id
from rayllm.serve.cluster.router import Router, prefix_hashes
from rayllm.serve.http.generation import has_begun
from rayllm.serve.http.limits import Admission, Load
from rayllm.serve.http.metrics import FrontMetrics
from rayllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from rayllm.engine.async_engine import AsyncEngine

logger = logging.getLogger("ray.serve")

WATCH_S = 1.0  # how often an API server asks the replicas for a report
CALL_TIMEOUT_S = 5.0
STATS_TIMEOUT_S = 5.0


class FrontModel(msgspec.Struct, frozen=True, kw_only=True):
    """What an API server knows of a model before it has met an engine. name: in the API. folder: of the checkpoint.

    max_num_seqs: completions that one replica runs at once.
    """

    name: str
    folder: str
    server: ServerConfig = ServerConfig()
    skip_tokenizer_init: bool = False
    max_num_seqs: int = 256


class _Replica:
    """A replica, the connection to it, and this server's work there.

    completions: live ones. queued_tokens: prompt tokens that it has to compute before first tokens, as far as is known.
    leaving: it gets no new requests.
    """

    def __init__(self, report: ReplicaReport, engine: AsyncEngine):
        self.report = report
        self.engine = engine
        self.completions = self.queued_tokens = 0
        self.leaving = False

    @property
    def own_load(self) -> Load:
        return Load(self.completions, self.queued_tokens)

    @property
    def why_leaving(self) -> str:
        return "the server is shutting down" if self.report.draining else "the engine is being restarted"

    @property
    def load(self) -> Load:
        """All API servers' together."""
        return self.own_load + self.report.others_here


class ModelFront:
    """One model of an API server. tokenizer: None with skip_tokenizer_init. All methods are of one event loop."""

    def __init__(self, model: FrontModel, handle: Any, tokenizer: Tokenizer | None, server_id: str):
        self.name = model.name
        self.server = model.server
        self.metrics = FrontMetrics()
        self.admission = Admission(model.server, model.max_num_seqs)
        self._model = model
        self._handle = handle
        self._tokenizer = tokenizer
        self._server_id = server_id
        self._replicas: dict[str, _Replica] = {}
        self._router = Router()
        self._figures: dict[str, bytes] = {}  # of the other servers, as last heard
        self._why_not = "the engine is starting"
        self._watcher: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Wait for an engine, and connect to all there are; follow them from then on. Raises EngineDeadError."""
        await self._handle.info.remote()  # which waits until there is a replica
        await self.refresh()
        self._watcher = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """Stop following the engines, and disconnect from them; what still runs is aborted."""
        if self._watcher is not None:
            self._watcher.cancel()
        for replica_id in list(self._replicas):
            await self._let_go(replica_id)

    # ---- what the routes use

    def engine(self) -> ModelFront:
        """This, if a request can be sent. Raises EngineDeadError while there is no replica for it."""
        if not self._usable():
            raise EngineDeadError(self._reason())
        return self

    @property
    def info(self) -> EngineInfo:
        """The limits of the engine with the smallest context: during an update replicas may differ."""
        usable = self._usable()
        if not usable:
            raise EngineDeadError(self._reason())
        return min((replica.engine.info for replica in usable.values()), key=lambda info: info.max_model_len)

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._tokenizer

    @property
    def num_replicas(self) -> int:
        """Replicas that new requests can go to."""
        return len(self._usable())

    async def unhealthy_reason(self) -> str | None:
        """None if requests are being answered, else why not; as of the last report, about a second ago."""
        usable = self._usable()
        reasons = [replica.report.unhealthy for replica in usable.values()]
        return None if usable and None in reasons else next(iter(reasons), None) or self._reason()

    def peer_metrics(self) -> list[bytes]:
        """The other API servers' figures, as of the last report."""
        return [figures for server_id, figures in self._figures.items() if server_id != self._server_id]

    async def stats(self) -> dict[str, EngineStats]:
        """Figures of the engines that answer, by the value of their label `engine`."""
        replicas = [replica for replica in self._replicas.values() if replica.engine.dead is None]
        answers = await asyncio.gather(
            *(asyncio.wait_for(replica.engine.stats(), STATS_TIMEOUT_S) for replica in replicas), return_exceptions=True
        )
        found: dict[str, EngineStats] = {}
        for replica, answer in zip(replicas, answers, strict=True):
            if isinstance(answer, EngineStats):
                label = str(replica.report.index)
                found[label if label not in found else replica.report.replica_id] = answer
        return found

    async def generate(
        self, request: GenerationRequest, prompt_text: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run a request on a replica, as `AsyncEngine.generate` does. Raises EngineDeadError, InvalidRequestError."""
        replica, waiting = self._route(request)
        live = request.params.width
        replica.completions += live
        replica.queued_tokens += waiting
        try:
            async with aclosing(replica.engine.generate(request, prompt_text)) as outputs:
                async for output in outputs:
                    if waiting and has_begun(output):
                        replica.queued_tokens -= waiting
                        waiting = 0
                    ended = sum(each.finish_reason is not None for each in output.outputs)
                    replica.completions -= ended
                    live -= ended
                    yield output
        finally:
            replica.completions -= live
            replica.queued_tokens -= waiting

    # ---- following the replicas

    async def refresh(self) -> None:
        """Exchange reports with all replicas; connect to new ones, let go of those that leave."""
        report = FrontReport(
            server_id=self._server_id,
            total=self.admission.load,
            loads={replica_id: replica.own_load for replica_id, replica in self._replicas.items()},
            metrics=self.metrics.snapshot(),
        )
        reports = await self._exchange(report)
        for each in reports:
            await self._take(each)
        present = {each.replica_id for each in reports}
        for replica_id, replica in list(self._replicas.items()):
            if replica_id not in present:
                replica.leaving = True
            if replica.engine.dead is not None or (replica.leaving and not replica.completions):
                self._why_not = replica.engine.dead or replica.why_leaving
                await self._let_go(replica_id)
        if reports:
            self.admission.others = max((each.others_total for each in reports), key=lambda load: load.completions)
            self._figures = {server: figures for each in reports for server, figures in each.metrics.items()}
        self.admission.max_running = self._model.max_num_seqs * max(self.num_replicas, 1)

    async def _exchange(self, report: FrontReport) -> list[ReplicaReport]:
        """The reports of the replicas that answer."""
        from ray.serve.exceptions import DeploymentUnavailableError

        try:
            response = self._handle.broadcast("exchange", report)
            answers = await response.results_async(timeout_s=CALL_TIMEOUT_S, return_exceptions=True)
        except DeploymentUnavailableError:  # there is no replica at all
            return []
        return [each for each in answers if isinstance(each, ReplicaReport)]

    async def _take(self, report: ReplicaReport) -> None:
        known = self._replicas.get(report.replica_id)
        if known is not None and known.engine.dead is None:
            known.report, known.leaving = report, report.draining
            return
        if known is not None:
            await self._let_go(report.replica_id)
        if report.draining:
            self._why_not = "the server is shutting down"
            return
        try:
            engine = await self._connect(report)
        except EngineDeadError as error:
            logger.warning("replica %s of %s cannot be reached: %s", report.replica_id, self.name, error)
            self._why_not = str(error)
            return
        self._replicas[report.replica_id] = _Replica(report, engine)
        self._router.add_replica(report.replica_id, report.info.num_kv_tokens)

    async def _connect(self, report: ReplicaReport) -> AsyncEngine:
        from rayllm.engine.async_engine import AsyncEngine
        from rayllm.engine.client import EngineClient, ZmqClient
        from rayllm.serve.cluster.relay import RelayClient

        client: EngineClient
        if report.endpoint.node_id == node_id():
            client = ZmqClient(report.endpoint.address)
        else:
            logger.warning("a replica of %s is on another node; its requests are relayed, at some latency", self.name)
            client = RelayClient(self._handle, report.replica_id, report.info)
        engine = AsyncEngine(client, self._tokenizer)
        await engine.start()
        return engine

    async def _let_go(self, replica_id: str) -> None:
        self._router.remove_replica(replica_id)
        await self._replicas.pop(replica_id).engine.close()

    async def _watch(self) -> None:
        """Notice replicas that come, leave, or break, also when no request does."""
        while True:
            await asyncio.sleep(WATCH_S)
            try:
                await self.refresh()
            except Exception as error:
                logger.warning("the replicas of %s cannot be asked: %s", self.name, error or type(error).__name__)

    # ---- which replica

    def _usable(self) -> dict[str, _Replica]:
        """Replicas that new requests may go to: healthy ones, or whatever there is."""
        there = {
            replica_id: replica
            for replica_id, replica in self._replicas.items()
            if not replica.leaving and replica.engine.dead is None
        }
        return {key: replica for key, replica in there.items() if replica.report.unhealthy is None} or there

    def _reason(self) -> str:
        """Why there is no replica to send to."""
        for replica in self._replicas.values():
            if replica.leaving:
                return replica.why_leaving
        return next((each.engine.dead for each in self._replicas.values() if each.engine.dead), self._why_not)

    def _route(self, request: GenerationRequest) -> tuple[_Replica, int]:
        """(the replica for a request, prompt tokens that it probably has to compute). Raises EngineDeadError."""
        usable = self._usable()
        if not usable:
            raise EngineDeadError(self._reason())
        hashes = prefix_hashes(request.prompt_token_ids, request.cache_salt)
        replica_id, cached = self._router.choose(hashes, {key: replica.load for key, replica in usable.items()})
        return usable[replica_id], len(request.prompt_token_ids) - cached
