"""`ModelFront`: one model as an API server serves it. It connects to the replicas, and chooses one for each request.

It is the `Engine` that the routes use: `generate` sends a request to the replica that `router.py` chooses. A replica
that drains gets no new requests; when this server's last one there is done, the connection is closed, by which the
replica knows that it may end. If it ends before that, or dies, its requests go on on another replica.

Servers hear of each other's work and figures through RELAYS of the replicas, the same for all of them; all other
replicas are told only of what they have of this server.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import NamedTuple

import msgspec

from rayllm import timeouts
from rayllm.api.types import EngineInfo, EngineStats, GenerationRequest, Load, RequestOutput
from rayllm.api.wire import VERSION, CurveKeys, EngineBeat, FrontBeat, Snapshot, take_newer
from rayllm.config.options import ServerConfig
from rayllm.engine.client import EngineClient
from rayllm.errors import EngineDeadError
from rayllm.hub import local_adapter
from rayllm.serve.cluster.adapters import Deciding, FrontAdapters
from rayllm.serve.cluster.directory import EngineMember
from rayllm.serve.cluster.router import Router
from rayllm.serve.http.limits import Admission
from rayllm.serve.http.metrics import FrontMetrics
from rayllm.text.outputs import RequestState
from rayllm.text.tokenizer import Tokenizer

RELAYS = 3  # so that no two servers' relays differ in all while replicas come and go

logger = logging.getLogger("ray.serve")


class FrontModel(msgspec.Struct, frozen=True, kw_only=True):
    """What an API server knows of a model before it has met an engine."""

    # In the API.
    name: str
    # Of the checkpoint.
    folder: str
    server: ServerConfig = ServerConfig()
    skip_tokenizer_init: bool = False
    enable_lora: bool = False
    # Paths by name of those that engines have from their options.
    adapters: dict[str, str] = {}
    # The option.
    download_dir: str | None = None


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


class _Pool(NamedTuple):
    """The replicas for new requests: healthy ones, or whatever there is."""

    replicas: dict[str, _Replica]
    names: list[str]
    # The limits of the one with the smallest context: during an update replicas may differ. None if there is none.
    info: EngineInfo | None


class ModelFront:
    """One model of an API server. All methods are of one event loop.

    tokenizer: None with skip_tokenizer_init. front_id: of the API server, unique for each start. node_id: where it is.
    index: of the API server, from 0 on; no two number requests alike. connect: makes clients. directory: where it is
    written which adapters there are to be.
    """

    def __init__(
        self,
        model: FrontModel,
        tokenizer: Tokenizer | None,
        front_id: str,
        node_id: str,
        index: int = 0,
        connect: Callable[..., EngineClient] = EngineClient,
        directory: Deciding | None = None,
    ):
        self.name = model.name
        self.server = model.server
        self.tokenizer = tokenizer
        self.metrics = FrontMetrics()
        self.admission = Admission(model.server, 0)
        find = partial(local_adapter, cache_dir=model.download_dir)
        self.lora = FrontAdapters(model.name, model.enable_lora, model.adapters, directory, node_id, find)
        self._front_id, self._node_id = front_id, node_id
        self._make_client = connect
        self._replicas: dict[str, _Replica] = {}
        self._connecting: dict[str, asyncio.Task[None]] = {}
        self._router = Router(b"")
        self._pool: _Pool | None = None  # None: to be found out
        self._relays: list[str] = []
        self._told: dict[str, int] = {}  # relay -> the number of the snapshot that it has
        self._peers: dict[str, Snapshot] = {}  # of the deployment's other servers, by their ids
        self._closed = False
        self.is_last = False  # no engine is to come any more, as all of the deployment ends
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
        identify this server with on other nodes, and from which all servers derive the same choices.
        """
        if self._router.key != (key := keys.secret.encode()):
            self._router = Router(key)
            for replica_id, replica in self._replicas.items():
                self._router.add_replica(replica_id, replica.client.info.num_kv_tokens)
        self._hear_peers()
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
                await self._replicas.pop(replica_id).client.close()
                self._look_again()
        # What a replica has cached outlives a connection to it.
        for replica_id in self._router.replicas - self._replicas.keys() - {member.member_id for member in engines}:
            self._router.remove_replica(replica_id)
        self._find_usable()
        others = [self._replicas[replica_id].beat.others_total for replica_id in self._relays]
        self.admission.others = max(others, default=Load(), key=lambda load: load.completions)

    def _look_again(self) -> None:
        """A replica came, went, or is another way than it was."""
        self._pool = None

    def _find_usable(self) -> _Pool:
        """As many completions may run as all of them can at once; while there is none, as many as before."""
        if self._pool is None:
            there = {key: replica for key, replica in self._replicas.items() if replica.is_usable}
            chosen = {key: replica for key, replica in there.items() if replica.beat.unhealthy is None} or there
            infos = [replica.client.info for replica in chosen.values()]
            self._pool = _Pool(chosen, list(chosen), min(infos, default=None, key=lambda info: info.max_model_len))
            places = sum(replica.client.info.max_num_seqs for replica in there.values())
            self.admission.max_running = places or self.admission.max_running
            self._relays = sorted(there)[:RELAYS]
            self._told = {key: number for key, number in self._told.items() if key in self._relays}
        return self._pool

    # ---- what the routes use

    def engine(self) -> ModelFront:
        """This, if a request can be sent. Raises EngineDeadError while there is no replica for it."""
        self._usable()
        return self

    @property
    def info(self) -> EngineInfo:
        """The limits of the engine with the smallest context. Raises EngineDeadError while there is none."""
        info = self._usable().info
        assert info is not None
        return info

    @property
    def num_replicas(self) -> int:
        """Replicas that new requests can go to."""
        return sum(replica.is_usable for replica in self._replicas.values())

    @property
    def is_connecting(self) -> bool:
        """Whether an engine that the directory knows has not answered yet."""
        return bool(self._connecting)

    async def unhealthy_reason(self) -> str | None:
        """None if requests are being answered, else why not; as of the last beat."""
        try:
            return next(iter(self._usable().replicas.values())).beat.unhealthy
        except EngineDeadError as error:
            return str(error)

    def peer_metrics(self) -> list[dict[str, float]]:
        """The metrics of the deployment's other servers, as last heard; also of those that are gone."""
        self._hear_peers()
        return [snapshot.figures for snapshot in self._peers.values()]

    async def stats(self) -> dict[str, EngineStats]:
        """Figures of the engines, by the value of their label `engine`; of now, or as last heard if one is slow."""
        await asyncio.gather(*(replica.client.ask() for replica in self._replicas.values()))
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
            replica, waiting = await self._find_successor(state.request)
            self.metrics.resumed.inc()

    @property
    def adapters(self) -> list[str]:
        """The names of the adapters that requests may ask for."""
        return list(self.lora.versions)

    async def load_adapter(self, name: str, path: str) -> None:
        """See `FrontAdapters.load`."""
        await self.lora.load(name, path)

    async def unload_adapter(self, name: str) -> None:
        """See `FrontAdapters.unload`."""
        await self.lora.unload(name)

    def forget(self, key_id: str) -> None:
        """Nobody will send the request with this key again; whichever replica has it keeps it no more."""
        for replica in self._replicas.values():
            replica.client.forget(key_id)

    async def _run(self, replica: _Replica, state: RequestState, waiting: int) -> AsyncGenerator[RequestOutput, None]:
        """Run a request on this replica. waiting: prompt tokens that it probably has to compute."""
        live = state.num_live
        replica.load += Load(live, waiting)
        try:
            replica.client.tell()
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

    async def _find_successor(self, request: GenerationRequest) -> tuple[_Replica, int]:
        """As `_find_or_route` for what a lost replica had; waits for one, also if the last one dies in the middle of
        that. Raises EngineDeadError if none is to be expected."""
        deadline = time.monotonic() + timeouts.RESUME_S
        while True:
            try:
                self._usable()
                return await self._find_or_route(request)
            except EngineDeadError:
                if self._closed or self.is_last or time.monotonic() > deadline:
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
            on_change=self._look_again,
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
            self._look_again()
            self._find_usable()
        finally:
            del self._connecting[replica_id]

    def _beat(self, replica_id: str) -> FrontBeat:
        """What to tell a replica of this server."""
        replica = self._replicas.get(replica_id)
        here = Load() if replica is None else replica.load
        self._find_usable()
        if replica_id not in self._relays:
            return FrontBeat(here)
        now = time.monotonic()
        if now >= self._next_snapshot:  # one for all relays
            self._next_snapshot = now + timeouts.METRICS_S
            self._snapshot = Snapshot(self._snapshot.number + 1, self.metrics.figures())
        metrics = {} if replica_id in self._told else dict(self._peers)  # a new one is told of all servers
        if self._told.get(replica_id) != self._snapshot.number:
            metrics[self._front_id] = self._snapshot
        self._told[replica_id] = self._snapshot.number
        return FrontBeat(here, self.admission.load, metrics)

    def _hear_peers(self) -> None:
        for replica in self._replicas.values():
            take_newer(self._peers, replica.client.peer_metrics)

    # ---- which replica

    def _usable(self) -> _Pool:
        """Replicas for new requests. Raises EngineDeadError if there is none."""
        pool = self._find_usable()
        if not pool.names:
            replicas = self._replicas.values()
            draining = any(replica.beat.draining for replica in replicas)
            dead = next((replica.client.dead for replica in replicas if replica.client.dead), self._why_not)
            raise EngineDeadError("the server is shutting down" if draining else dead)
        return pool

    async def _find_or_route(self, request: GenerationRequest) -> tuple[_Replica, int]:
        """As `route`; but a request with a key goes to the replica that has it, if one does."""
        replicas = list(self._replicas.values())
        if request.key is not None and len(replicas) > 1:
            known = await asyncio.gather(*(replica.client.knows(request.key.id) for replica in replicas))
            if True in known:
                return replicas[known.index(True)], 0
        return self.route(request)

    def route(self, request: GenerationRequest) -> tuple[_Replica, int]:
        """(the replica for a request, prompt tokens that it probably has to compute). Raises EngineDeadError."""
        replicas, names, _ = self._usable()

        def load(replica_id: str) -> Load | None:
            replica = replicas.get(replica_id)
            return None if replica is None else replica.load + replica.beat.others_here

        salt = request.cache_salt
        if request.adapter:
            # A replica that starts may not have it yet. What is cached of another version is of no use.
            version = self.lora.versions.get(request.adapter)
            names = [each for each in names if replicas[each].member.adapters.get(request.adapter) == version] or names
            salt = f"{request.adapter} {version} {salt}"
        prompt = self._router.prompt(request.prompt_token_ids, salt, request.prompt_cache_key)
        replica_id, cached = self._router.choose(prompt, names, load)
        return replicas[replica_id], len(request.prompt_token_ids) - cached
