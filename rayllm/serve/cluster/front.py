"""`ModelFront`: one model as an API server serves it. It connects to the replicas, and chooses one for each request.

It is the `Engine` that the routes use: `generate` sends a request to the replica that `router.py` chooses. A replica
that drains gets no new requests; when this server's last one there is done, the connection is closed, by which the
replica knows that it may end.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

import msgspec

from rayllm import timeouts
from rayllm.api.types import EngineInfo, EngineStats, GenerationRequest, Load, RequestOutput
from rayllm.api.wire import VERSION, CurveKeys, EngineBeat, FrontBeat, Snapshot
from rayllm.config.options import ServerConfig
from rayllm.engine.client import EngineClient
from rayllm.errors import EngineDeadError
from rayllm.serve.cluster.directory import EngineMember
from rayllm.serve.cluster.router import Router, prefix_hashes
from rayllm.serve.http.limits import Admission
from rayllm.serve.http.metrics import FrontMetrics
from rayllm.text.outputs import RequestState
from rayllm.text.tokenizer import Tokenizer

logger = logging.getLogger("ray.serve")


class FrontModel(msgspec.Struct, frozen=True, kw_only=True):
    """What an API server knows of a model before it has met an engine."""

    # In the API.
    name: str
    # Of the checkpoint.
    folder: str
    server: ServerConfig = ServerConfig()
    skip_tokenizer_init: bool = False


class _Replica:
    """A replica that this server is connected to, and this server's work there."""

    def __init__(self, member: EngineMember, client: EngineClient):
        self.member, self.client = member, client
        self.load = Load()  # of this server

    @property
    def beat(self) -> EngineBeat:
        return self.client.engine_beat

    @property
    def is_usable(self) -> bool:
        """Whether it is there for new requests; it may be unhealthy."""
        return self.client.dead is None and not self.beat.draining


class ModelFront:
    """One model of an API server. All methods are of one event loop.

    tokenizer: None with skip_tokenizer_init. front_id: of the API server, unique for each start. node_id: where it is.
    index: of the API server, from 0 on; no two number requests alike. connect: makes clients.
    """

    def __init__(
        self,
        model: FrontModel,
        tokenizer: Tokenizer | None,
        front_id: str,
        node_id: str,
        index: int = 0,
        connect: Callable[..., EngineClient] = EngineClient,
    ):
        self.name = model.name
        self.server = model.server
        self.tokenizer = tokenizer
        self.metrics = FrontMetrics()
        self.admission = Admission(model.server, 0)
        self._front_id, self._node_id = front_id, node_id
        self._make_client = connect
        self._replicas: dict[str, _Replica] = {}
        self._connecting: dict[str, asyncio.Task[None]] = {}
        self._router = Router()
        self._closed = False
        self._why_not = "the engine is starting"
        self._snapshot, self._next_snapshot = Snapshot(), 0.0
        self._numbers = itertools.count(1 + (index << 32))

    async def close(self) -> None:
        """Disconnect from the engines; what still runs is aborted."""
        self._closed = True
        for task in self._connecting.values():
            task.cancel()
        await asyncio.gather(*(replica.client.close() for replica in self._replicas.values()))
        self._replicas = {}

    async def update(self, engines: Sequence[EngineMember], keys: CurveKeys) -> None:
        """Connect to the engines that are new, let go of those that died, or drained and are done.

        engines: of this model, as the directory knows them. One that it misses is used as long as it answers. keys: to
        identify this server with on other nodes.
        """
        for member in engines:
            replica_id = member.member_id
            if replica_id in self._replicas:
                self._replicas[replica_id].member = member
            elif member.version != VERSION:
                self._why_not = "the engine is of another version of rayllm than this API server"
            elif replica_id not in self._connecting and self._address(member) and not member.draining:
                # Beside, as an engine that does not answer must not hold up the others.
                self._connecting[replica_id] = asyncio.create_task(self._connect(member, keys))
        for replica_id, replica in list(self._replicas.items()):
            if replica.client.dead is not None or (replica.beat.draining and not replica.load.completions):
                self._why_not = replica.client.dead or "the server is shutting down"
                if replica.client.dead is not None and not replica.beat.draining:
                    logger.warning("an engine of %s is lost: %s", self.name, replica.client.dead)
                self._router.remove_replica(replica_id)
                await self._replicas.pop(replica_id).client.close()
        others = [replica.beat.others_total for replica in self._replicas.values()]
        self.admission.others = max(others, default=Load(), key=lambda load: load.completions)
        self._count_places()

    def _count_places(self) -> None:
        """Let as many completions run as the engines can at once; while there is none, as many as before."""
        places = sum(replica.client.info.max_num_seqs for replica in self._replicas.values() if replica.is_usable)
        self.admission.max_running = places or self.admission.max_running

    # ---- what the routes use

    def engine(self) -> ModelFront:
        """This, if a request can be sent. Raises EngineDeadError while there is no replica for it."""
        self._usable()
        return self

    @property
    def info(self) -> EngineInfo:
        """The limits of the engine with the smallest context: during an update replicas may differ."""
        infos = [replica.client.info for replica in self._usable().values()]
        return min(infos, key=lambda info: info.max_model_len)

    @property
    def num_replicas(self) -> int:
        """Replicas that new requests can go to."""
        return sum(replica.is_usable for replica in self._replicas.values())

    async def unhealthy_reason(self) -> str | None:
        """None if requests are being answered, else why not; as of the last beat."""
        try:
            reasons = [replica.beat.unhealthy for replica in self._usable().values()]
        except EngineDeadError as error:
            return str(error)
        return None if None in reasons else reasons[0]

    def peer_metrics(self) -> list[dict[str, float]]:
        """The metrics of the deployment's other servers, as last heard; also of those that are gone."""
        latest: dict[str, Snapshot] = {}
        for replica in self._replicas.values():
            for front_id, snapshot in replica.client.peer_metrics.items():
                if front_id not in latest or snapshot.number > latest[front_id].number:
                    latest[front_id] = snapshot
        return [snapshot.figures for snapshot in latest.values()]

    async def stats(self) -> dict[str, EngineStats]:
        """Figures of the engines that answer, by the value of their label `engine`; as of their last beat."""
        found: dict[str, EngineStats] = {}
        for replica_id, replica in self._replicas.items():
            if replica.client.dead is None:
                label = str(replica.member.index)
                found[label if label not in found else replica_id] = replica.beat.stats
        return found

    async def generate(
        self, request: GenerationRequest, prompt_text: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run a request on a replica, as `EngineClient.generate` does; if that dies, it goes on on another one.

        One with a key goes to the replica that has it already. Raises EngineDeadError if there is none,
        InvalidRequestError.
        """
        replica, waiting = await self._find_or_route(request)
        request = request.numbered(next(self._numbers), replica.client.info.seed)
        state = RequestState(self.tokenizer, request, prompt_text)
        while True:
            try:
                async with aclosing(self._run(replica, state, waiting)) as outputs:
                    async for output in outputs:
                        yield output
                return
            except EngineDeadError:
                pass
            if (end := state.lose_engine(died=not replica.beat.draining)) is not None:
                yield end
                return
            await self._wait_for_successor(replica)
            replica, waiting = await self._find_or_route(state.request)
            self.metrics.resumed.inc()

    async def _run(self, replica: _Replica, state: RequestState, waiting: int) -> AsyncGenerator[RequestOutput, None]:
        """Run a request on this replica. waiting: prompt tokens that it probably has to compute."""
        live = state.num_live
        replica.load += Load(live, waiting)
        try:
            async with aclosing(replica.client.run(state)) as outputs:
                async for output in outputs:
                    if waiting and output.has_begun:
                        replica.load += Load(0, -waiting)
                        waiting = 0
                    ended = sum(each.finish_reason is not None for each in output.outputs)
                    replica.load += Load(-ended, 0)
                    live -= ended
                    yield output
        finally:
            replica.load += Load(-live, -waiting)

    async def _wait_for_successor(self, lost: _Replica) -> None:
        """Until there is a replica for what this one had. Raises EngineDeadError if none is to be expected."""
        deadline = time.monotonic() + timeouts.RESUME_S
        while True:
            try:
                self._usable()
                return
            except EngineDeadError:
                if self._closed or lost.beat.draining or time.monotonic() > deadline:
                    raise
            await asyncio.sleep(timeouts.RESUME_POLL_S)

    # ---- connections

    def _address(self, member: EngineMember) -> str:
        """Where to reach an engine; empty while it does not listen there yet."""
        return member.endpoint.ipc if member.node_id == self._node_id else member.endpoint.tcp

    async def _connect(self, member: EngineMember, keys: CurveKeys) -> None:
        replica_id, here = member.member_id, member.node_id == self._node_id
        client = self._make_client(
            self._address(member),
            self.tokenizer,
            front_id=self._front_id,
            beat=lambda: self._beat(replica_id),
            server_key="" if here else member.endpoint.public_key,
            keys=None if here else keys,
        )
        try:
            await client.connect()
        except EngineDeadError as error:  # it is tried again if the directory still knows it
            logger.warning("an engine of %s cannot be reached: %s", self.name, error)
            self._why_not = str(error)
        else:
            self._replicas[replica_id] = _Replica(member, client)
            self._router.add_replica(replica_id, client.info.num_kv_tokens)
            self._count_places()
        finally:
            del self._connecting[replica_id]

    def _beat(self, replica_id: str) -> FrontBeat:
        """What to tell a replica of this server."""
        now = time.monotonic()
        if now >= self._next_snapshot:  # one for all replicas
            self._next_snapshot = now + timeouts.METRICS_S
            self._snapshot = Snapshot(self._snapshot.number + 1, self.metrics.figures())
        replica = self._replicas.get(replica_id)
        return FrontBeat(self.admission.load, Load() if replica is None else replica.load, self._snapshot)

    # ---- which replica

    def _usable(self) -> dict[str, _Replica]:
        """Replicas for new requests: healthy ones, or whatever there is. Raises EngineDeadError if there is none."""
        there = {key: replica for key, replica in self._replicas.items() if replica.is_usable}
        if not there:
            replicas = self._replicas.values()
            draining = any(replica.beat.draining for replica in replicas)
            dead = next((replica.client.dead for replica in replicas if replica.client.dead), self._why_not)
            raise EngineDeadError("the server is shutting down" if draining else dead)
        return {key: replica for key, replica in there.items() if replica.beat.unhealthy is None} or there

    async def _find_or_route(self, request: GenerationRequest) -> tuple[_Replica, int]:
        """As `_route`; but a request with a key goes to the replica that has it, if one does."""
        replicas = list(self._replicas.values())
        if request.key is not None and len(replicas) > 1:
            known = await asyncio.gather(*(replica.client.knows(request.key.id) for replica in replicas))
            if True in known:
                return replicas[known.index(True)], 0
        return self._route(request)

    def _route(self, request: GenerationRequest) -> tuple[_Replica, int]:
        """(the replica for a request, prompt tokens that it probably has to compute). Raises EngineDeadError."""
        usable = self._usable()
        hashes = prefix_hashes(request.prompt_token_ids, request.cache_salt)
        loads = {key: replica.load + replica.beat.others_here for key, replica in usable.items()}
        replica_id, cached = self._router.choose(hashes, loads)
        return usable[replica_id], len(request.prompt_token_ids) - cached
