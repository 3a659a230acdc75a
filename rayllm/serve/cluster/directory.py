"""The directory of an application: who is there, and where. A small Ray actor that its members find by name.

It knows nothing but what its members say again every REGISTER_S, keys included, so one that is lost is made anew. No
request passes through it, and nobody stops using what he has because it is missing from the directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import msgspec
import ray
import zmq
from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from rayllm import timeouts
from rayllm.api.types import Load
from rayllm.api.wire import VERSION, CurveKeys, Endpoint
from rayllm.executor.ray_cluster import NAMESPACE
from rayllm.executor.ray_compat import draining_nodes
from rayllm.version import __version__

MAX_INCIDENTS = 32
MAX_CHANGES = 10_000  # the latest ones, of which the directory tells without telling all
_PREFIX = "directory of "  # of the actors' names

Result = TypeVar("Result")

logger = logging.getLogger("ray.serve")


class EngineMember(msgspec.Struct, frozen=True, tag=True):
    """A replica of an engine."""

    # Unique for each start.
    member_id: str
    # The model's name in the API.
    model: str
    # Small, and unique among the model's replicas that run.
    index: int
    # Ray's id of its node.
    node_id: str
    endpoint: Endpoint
    # It takes no new requests.
    draining: bool = False
    # Of the protocol between front and engine.
    version: int = VERSION
    # Adapters that were loaded while it ran, by name: the `LoraRecord.version` that requests get.
    adapters: dict[str, int] = {}
    # Those that could not be loaded: version -> why.
    adapter_errors: dict[int, str] = {}

    def can_replace(self, other: Member) -> bool:
        """Whether requests for the other one can go here."""
        return isinstance(other, EngineMember) and self.model == other.model and not self.draining


class ServerMember(msgspec.Struct, frozen=True, tag=True):
    """An API server."""

    # Unique for each start.
    member_id: str
    # Ray's id of its node.
    node_id: str
    # The models that it serves, by their names in the API.
    models: list[str] = []
    # Where it listens, "host:port"; empty if it does not listen itself.
    address: str = ""
    # It takes no new requests.
    draining: bool = False
    # Of the protocol between front and engine.
    version: int = VERSION
    # The latest `LoraRecord.changed` that it knows.
    adapters_known: int = 0

    def can_replace(self, other: Member) -> bool:
        """Whether requests for the other one can go here."""
        return isinstance(other, ServerMember) and bool(self.address) and not self.draining


class LaunchMember(msgspec.Struct, frozen=True, tag=True):
    """The `rayllm launch` to which the application belongs."""

    # Unique for each start.
    member_id: str
    # Ray's id of its node.
    node_id: str


class LoraRecord(msgspec.Struct, frozen=True):
    """What is to become of an adapter of a model, on all of the model's engines.

    Of a name the latest of the latest version holds: what an API server decides of a version that another one has
    replaced in the meantime changes nothing.
    """

    # The model's name in the API, and the adapter's.
    model: str
    name: str
    # Of its folder; empty once it is to go.
    path: str
    # Ray's id of the node of the API server that was asked, which may have the folder.
    node_id: str
    # When it was to be loaded or to go, unique: another time it may have other weights.
    version: int
    # When this was decided; grows.
    changed: int
    # All engines have it, so requests may ask for it.
    is_ready: bool = False


Replica = EngineMember | ServerMember
Member = Replica | LaunchMember


class View(msgspec.Struct, frozen=True):
    """What the directory knows, or what has changed of it since an earlier version."""

    engines: list[EngineMember]
    servers: list[ServerMember]
    # With which API servers identify themselves to engines on other nodes, and from which they derive where prompts go.
    front_keys: CurveKeys
    # Seconds until everything that still runs is to end; None if nobody has asked for that.
    stop_in: float | None = None
    # Grows with each change, also from one directory to the next.
    version: int = 0
    launches: list[LaunchMember] = []
    # Of adapters that came or went while engines ran, one a model and name; None if nothing has changed since the
    # version that was asked for.
    adapters: list[LoraRecord] | None = None
    # Ids of members that have gone since the version that was asked for; None if the view is whole.
    gone: list[str] | None = None

    def updated(self, changes: View) -> View:
        """This whole view, brought up to date."""
        if changes.gone is None:
            return changes
        changed: list[Member] = [*changes.engines, *changes.servers, *changes.launches]
        old = {*changes.gone, *(each.member_id for each in changed)}
        return msgspec.structs.replace(
            changes,
            engines=[each for each in self.engines if each.member_id not in old] + changes.engines,
            servers=[each for each in self.servers if each.member_id not in old] + changes.servers,
            launches=[each for each in self.launches if each.member_id not in old] + changes.launches,
            adapters=self.adapters if changes.adapters is None else changes.adapters,
            gone=None,
        )


def adapters_known(view: View) -> int:
    """When the latest of its decisions about adapters was made; 0 if there is none. Never before its latest version."""
    return max((record.changed for record in view.adapters or []), default=0)


def _latest(records: list[LoraRecord]) -> dict[tuple[str, str], LoraRecord]:
    """Of each model and name the record that holds."""
    latest: dict[tuple[str, str], LoraRecord] = {}
    for record in sorted(records, key=lambda each: (each.version, each.changed)):
        latest[record.model, record.name] = record
    return latest


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a member says of itself for `rayllm status`; other members need not know it."""

    member: Replica
    # Of rayllm.
    version: str = __version__
    pid: int = msgspec.field(default_factory=os.getpid)
    load: Load
    # Seconds until it ends at the latest; None if nobody has asked for that.
    stop_in: float | None = None
    # Where each rank of an engine is.
    ranks: list[str] = []
    # How often an engine's workers were replaced since its start, and how long it had none.
    num_recoveries: int = 0
    recovery_seconds: float = 0.0


class Incident(msgspec.Struct, frozen=True):
    """A member that was lost, or workers of one that were replaced."""

    # Unix time.
    at: float
    member: Replica
    # Without workers; None if the member itself was lost.
    seconds: float | None


class DirectoryStatus(msgspec.Struct, frozen=True):
    """What the directory knows beside a View."""

    reports: list[Report]
    # The last ones since this directory was made, latest last.
    incidents: list[Incident]


class Directory:
    """What the actor does. Entries go when their members leave, or have been silent for MEMBER_SILENCE_S.

    A beat costs as much as there is new to tell, however many members there are.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._keys: CurveKeys | None = None
        self._members: dict[str, tuple[float, Member]] = {}  # with when it was heard, least recent first
        self._first = self._version = time.time_ns()  # more than any version of a directory before this one
        self._changed: dict[str, int] = {}  # id -> version of its last change or its end; oldest first
        self._stop_at: float | None = None
        self._adapters: dict[tuple[str, str], LoraRecord] = {}
        self._adapters_changed = self._version
        self._reports: dict[str, Report] = {}
        self._incidents: deque[Incident] = deque(maxlen=MAX_INCIDENTS)

    def beat(self, member: Member | None = None, known: View | None = None) -> View:
        """Take in what a member says of itself; returns what there is to know. None only asks.

        known: the latest whole view that the member had, of which its lists may be left out; what it knows is not said
        again. A new directory takes over its keys, so that connections and choices stay as they are.
        """
        now = self._clock()
        if self._keys is None:
            public, secret = zmq.curve_keypair()
            self._keys = CurveKeys(public.decode(), secret.decode()) if known is None else known.front_keys
        if member is not None:
            if self._members.pop(member.member_id, (now, None))[1] != member:
                self._note(member.member_id)
            self._members[member.member_id] = (now, member)
        while self._members and next(iter(self._members.values()))[0] < now - timeouts.MEMBER_SILENCE_S:
            self._remove(next(iter(self._members)))
        ids, gone = list(self._members), None
        if known is not None and self._first <= known.version <= self._version:
            news = itertools.takewhile(lambda each: each[1] > known.version, reversed(self._changed.items()))
            changed = [member_id for member_id, _ in news]
            ids = [each for each in changed if each in self._members]
            gone = [each for each in changed if each not in self._members]
        members = [self._members[each][1] for each in ids]
        same_adapters = gone is not None and known is not None and known.version >= self._adapters_changed
        return View(
            adapters=None if same_adapters else list(self._adapters.values()),
            engines=[each for each in members if isinstance(each, EngineMember)],
            servers=[each for each in members if isinstance(each, ServerMember)],
            front_keys=self._keys,
            stop_in=None if self._stop_at is None else max(self._stop_at - now, 0.0),
            version=self._version,
            gone=gone,
            launches=[each for each in members if isinstance(each, LaunchMember)],
        )

    def decide(self, records: list[LoraRecord]) -> None:
        """Take in what is to become of adapters, or what members know that an earlier directory knew."""
        latest = _latest([*self._adapters.values(), *records])
        if latest != self._adapters:
            self._adapters = latest
            self._version += 1
            self._adapters_changed = self._version

    def leave(self, member_id: str) -> bool:
        """Remove a member; returns whether nobody is left."""
        self._reports.pop(member_id, None)
        if member_id in self._members:
            self._remove(member_id)
        return all(isinstance(member, LaunchMember) for _, member in self._members.values())

    def tell(self, report: Report) -> None:
        """Take in a report of a member that is here."""
        member, before = report.member, self._reports.get(report.member.member_id)
        if member.member_id not in self._members:
            return
        if before is not None and report.num_recoveries > before.num_recoveries:
            seconds = report.recovery_seconds - before.recovery_seconds
            self._incidents.append(Incident(time.time(), member, seconds))
        self._reports[member.member_id] = report
        for lost in self._reports.keys() - self._members.keys():  # who leaves takes his report along
            self._incidents.append(Incident(time.time(), self._reports.pop(lost).member, None))

    def status(self) -> DirectoryStatus:
        """The members' reports, and what broke."""
        self.beat()
        there = [report for member_id, report in self._reports.items() if member_id in self._members]
        return DirectoryStatus(there, list(self._incidents))

    def _remove(self, member_id: str) -> None:
        del self._members[member_id]
        self._note(member_id)

    def _note(self, member_id: str) -> None:
        """A member came, changed or went. Who knows no later version than those that are forgotten gets all."""
        self._version += 1
        self._changed.pop(member_id, None)
        self._changed[member_id] = self._version
        if len(self._changed) > MAX_CHANGES:
            self._first = self._changed.pop(next(iter(self._changed)))

    def stop(self, seconds: float) -> None:
        """Tell all members to end within so many seconds, as soon as running requests are done."""
        self._stop_at = self._clock() + seconds


class DirectoryActor:
    """The actor: a Directory that speaks msgpack, so that members of other versions may have other fields."""

    def __init__(self) -> None:
        self._directory = Directory()

    def beat(self, message: bytes) -> bytes:
        """See `Directory.beat`."""
        member, known = msgspec.msgpack.decode(message, type=tuple[Member | None, View | None])
        return msgspec.msgpack.encode(self._directory.beat(member, known))

    def leave(self, member_id: str) -> bool:
        """See `Directory.leave`."""
        return self._directory.leave(member_id)

    def decide(self, message: bytes) -> None:
        """See `Directory.decide`."""
        self._directory.decide(msgspec.msgpack.decode(message, type=list[LoraRecord]))

    def tell(self, message: bytes) -> None:
        """See `Directory.tell`."""
        self._directory.tell(msgspec.msgpack.decode(message, type=Report))

    def status(self) -> bytes:
        """See `Directory.status`."""
        return msgspec.msgpack.encode(self._directory.status())

    def stop(self, seconds: float) -> None:
        """See `Directory.stop`."""
        self._directory.stop(seconds)


class DirectoryLink:
    """The way to the directory of an application, which is made if there is none.

    All calls block, for up to DIRECTORY_S or, while Ray's GCS is down, longer.
    """

    def __init__(self, app_name: str):
        self.app_name, self._name = app_name, f"{_PREFIX}{app_name}"
        self._handle: ActorHandle | None = None
        self._view: View | None = None  # the last one, whole

    @classmethod
    def all(cls) -> list[DirectoryLink]:
        """To all that there are in the Ray cluster."""
        names = [each["name"] for each in ray.util.list_named_actors(True) if each["namespace"] == NAMESPACE]
        return [cls(name.removeprefix(_PREFIX)) for name in sorted(names) if name.startswith(_PREFIX)]

    def ask(self, member: Member | None = None) -> View | None:
        """Tell of a member, if there is one; returns what the directory knows, None if it does not answer."""
        known = self._view
        if known is not None:
            known = msgspec.structs.replace(known, engines=[], servers=[], launches=[], adapters=None)
        answer = self._call("beat", msgspec.msgpack.encode((member, known)))
        if answer is None:
            return None
        view = msgspec.msgpack.decode(answer, type=View)
        if self._view is not None and self._view.adapters and view.gone is None:  # a new directory, it may be
            self.decide(self._view.adapters)
            latest = _latest([*self._view.adapters, *(view.adapters or [])])
            view = msgspec.structs.replace(view, adapters=list(latest.values()))
        self._view = view if self._view is None else self._view.updated(view)
        return self._view

    def decide(self, records: list[LoraRecord]) -> None:
        """See `Directory.decide`."""
        self._call("decide", msgspec.msgpack.encode(records))

    def tell(self, report: Report) -> None:
        """See `Directory.tell`."""
        self._call("tell", msgspec.msgpack.encode(report))

    def status(self) -> DirectoryStatus | None:
        """See `Directory.status`; None if it does not answer."""
        answer = self._call("status")
        return None if answer is None else msgspec.msgpack.decode(answer, type=DirectoryStatus)

    def leave(self, member_id: str) -> None:
        """Say that a member goes. The last one takes the directory along."""
        if self._call("leave", member_id):
            self.remove()

    def stop(self, seconds: float) -> None:
        """See `Directory.stop`."""
        self._call("stop", seconds)

    def remove(self) -> None:
        """End the directory."""
        with contextlib.suppress(ValueError):  # there is none
            ray.kill(ray.get_actor(self._name, namespace=NAMESPACE))
        self._handle = None

    def _call(self, method: str, *arguments: object) -> Any:
        """The answer; None if there is none in time."""
        try:
            if self._handle is None:
                options = {"num_cpus": 0, "max_restarts": -1, "lifetime": "detached", "get_if_exists": True}
                actor: Any = ray.remote(DirectoryActor)
                self._handle = actor.options(name=self._name, namespace=NAMESPACE, **options).remote()
            return ray.get(getattr(self._handle, method).remote(*arguments), timeout=timeouts.DIRECTORY_S)
        except RayActorError:
            self._handle = None  # gone for good: the next call makes another one
        except Exception as error:
            logger.warning("the directory does not answer: %s", error or type(error).__name__)
        return None


class Membership:
    """A replica's part in the directory. It tells of the replica every REGISTER_S, until that has stopped.

    directory: where; that of the application if None. member: what the replica is now. report: what `rayllm status`
    shows of it, told every REPORT_S. on_view: called with what the directory knows. on_stop: ends the replica, by
    `stop_at` if it can; called once, when `stop_within` was. To be made in an event loop.
    """

    def __init__(
        self,
        directory: DirectoryLink,
        member: Callable[[], Replica],
        report: Callable[[], Report],
        on_view: Callable[[View], Awaitable[None]],
        on_stop: Callable[[], Awaitable[None]],
    ):
        self._directory, self._member, self._on_view, self._on_stop = directory, member, on_view, on_stop
        self._report, self._next_report = report, 0.0
        self.stop_at = math.inf  # time.monotonic()
        self.is_leaving = False  # its host is to go away, and it with it as soon as there is another one
        self._view: View | None = None  # the latest
        self._stopping: asyncio.Task[None] | None = None
        # Of its own: the loop's threads may wait for a folder that does not answer, and this one must not be silent.
        self._threads = ThreadPoolExecutor(2, "rayllm-directory")
        self._following = asyncio.create_task(self._follow())

    @property
    def is_stopping(self) -> bool:
        """Whether somebody has asked for that."""
        return self._stopping is not None

    @property
    def stop_in(self) -> float | None:
        """Seconds until the replica ends at the latest; None if nobody has asked for that."""
        return max(self.stop_at - time.monotonic(), 0.0) if self.is_stopping else None

    async def announce(self) -> None:
        """Tell the directory at once what has changed."""
        await self._call(self._directory.ask, self._member())

    async def _call(self, function: Callable[..., Result], *args: object) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    async def time_to_stop(self, seconds: float, place: Place) -> float:
        """For a replica that Serve has told to stop: return when it should, with the seconds that are left for that.

        seconds: that it may take. On a host that goes away they end LEAVE_S before that, and Serve may not have waited
        until another replica was up, so this waits for one.
        """
        left = await asyncio.to_thread(place.time_left)
        stop_at = time.monotonic() + min(seconds, left - timeouts.LEAVE_S)
        if left < math.inf:
            self.is_leaving = True
            while not self._has_successor() and not self.is_stopping and time.monotonic() < stop_at:
                await asyncio.sleep(timeouts.REGISTER_S / 10)
            if self._has_successor():
                await asyncio.sleep(2 * timeouts.REGISTER_S)  # for API servers and HAProxy to find it too
        return max(stop_at - time.monotonic(), 0.0)

    def _has_successor(self) -> bool:
        own, view = self._member(), self._view
        others: list[Replica] = [] if view is None else [*view.engines, *view.servers]
        return any(each.node_id != own.node_id and each.can_replace(own) for each in others)

    def stop_within(self, seconds: float) -> asyncio.Task[None]:
        """Have the replica end, and leave. Calling it again can only shorten the time."""
        self.stop_at = min(self.stop_at, time.monotonic() + seconds)
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop())
        return self._stopping

    async def _stop(self) -> None:
        await self._on_stop()
        self._following.cancel()
        await self._call(self._directory.leave, self._member().member_id)
        self._threads.shutdown(wait=False)

    async def _follow(self) -> None:
        while True:
            try:
                view = await self._call(self._directory.ask, self._member())
                if view is not None:
                    self._view = view
                    await self._on_view(view)
                    if view.stop_in is not None:
                        self.stop_within(view.stop_in)
                if time.monotonic() >= self._next_report:
                    self._next_report = time.monotonic() + timeouts.REPORT_S
                    await self._call(self._directory.tell, self._report())
            except Exception:
                logger.exception("following the directory")
            await asyncio.sleep(timeouts.REGISTER_S)


class Place(NamedTuple):
    """Where a Serve replica is."""

    # Of the Serve application.
    app_name: str
    # Serve's, unique for each start.
    replica_id: str
    # Ray's id of the node.
    node_id: str
    # The node's address in the cluster.
    host: str

    @property
    def replica_index(self) -> int:
        """Serve's rank of the replica: from 0 to the number of replicas - 1, given anew when one has gone."""
        return int(_replica_context().rank.rank)

    def time_left(self) -> float:
        """Seconds until the host goes away, math.inf if that is not known. Blocks for DIRECTORY_S at most."""
        try:
            return draining_nodes(timeouts.DIRECTORY_S).get(self.node_id, math.inf)
        except Exception as error:
            logger.warning("Ray does not say whether this host goes away: %s", error)
            return math.inf


def _replica_context() -> Any:
    """Serve's, of the replica that runs in this process."""
    # Its import takes half a second, for which neither the directory's actor nor those of ingresses have to wait.
    from ray import serve

    return serve.get_replica_context()


def own_place() -> Place:
    """Of the Serve replica that runs in this process."""
    context = _replica_context()
    node_id = ray.get_runtime_context().get_node_id()
    return Place(context.app_name, context.replica_id.unique_id, node_id, ray.util.get_node_ip_address())


def address(host: str, port: int) -> str:
    """As URLs and HAProxy have it: "host:port", with brackets around IPv6 addresses."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
