"""The directory of an application: who is there, and where. A small Ray actor that its members find by name.

It knows nothing but what its members say again every REGISTER_S, so one that is lost is simply made anew. No request
passes through it, and nobody stops using what he has because it is missing from the directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import msgspec
import ray
import zmq
from ray import serve
from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from rayllm import timeouts
from rayllm.api.wire import VERSION, CurveKeys, Endpoint

NAMESPACE = "rayllm"

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


class LaunchMember(msgspec.Struct, frozen=True, tag=True):
    """The `rayllm launch` to which the application belongs."""

    # Unique for each start.
    member_id: str
    # Ray's id of its node.
    node_id: str


Member = EngineMember | ServerMember | LaunchMember


class View(msgspec.Struct, frozen=True):
    """What the directory knows."""

    engines: list[EngineMember]
    servers: list[ServerMember]
    # With which API servers identify themselves to engines on other nodes.
    front_keys: CurveKeys
    # Seconds until everything that still runs is to end; None if nobody has asked for that.
    stop_in: float | None = None
    launches: list[LaunchMember] = []


class Directory:
    """What the actor does. Entries go when their members leave, or have been silent for MEMBER_SILENCE_S."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        public, secret = zmq.curve_keypair()
        self._clock = clock
        self._keys = CurveKeys(public.decode(), secret.decode())
        self._members: dict[str, tuple[float, Member]] = {}
        self._stop_at: float | None = None

    def beat(self, member: Member | None = None) -> View:
        """Take in what a member says of itself; returns what there is to know. None only asks."""
        now = self._clock()
        if member is not None:
            self._members[member.member_id] = (now, member)
        limit = now - timeouts.MEMBER_SILENCE_S
        self._members = {key: entry for key, entry in self._members.items() if entry[0] >= limit}
        members = [member for _, member in self._members.values()]
        return View(
            engines=[each for each in members if isinstance(each, EngineMember)],
            servers=[each for each in members if isinstance(each, ServerMember)],
            front_keys=self._keys,
            stop_in=None if self._stop_at is None else max(self._stop_at - now, 0.0),
            launches=[each for each in members if isinstance(each, LaunchMember)],
        )

    def leave(self, member_id: str) -> bool:
        """Remove a member; returns whether nobody is left."""
        self._members.pop(member_id, None)
        return all(isinstance(member, LaunchMember) for _, member in self._members.values())

    def stop(self, seconds: float) -> None:
        """Tell all members to end within so many seconds, as soon as running requests are done."""
        self._stop_at = self._clock() + seconds


class DirectoryActor:
    """The actor: a Directory that speaks msgpack, so that members of other versions may have other fields."""

    def __init__(self) -> None:
        self._directory = Directory()

    def beat(self, member: bytes | None) -> bytes:
        """See `Directory.beat`."""
        known = None if member is None else msgspec.msgpack.decode(member, type=Member)
        return msgspec.msgpack.encode(self._directory.beat(known))

    def leave(self, member_id: str) -> bool:
        """See `Directory.leave`."""
        return self._directory.leave(member_id)

    def stop(self, seconds: float) -> None:
        """See `Directory.stop`."""
        self._directory.stop(seconds)


class DirectoryLink:
    """The way to the directory of an application, which is made if there is none.

    All calls block, for up to DIRECTORY_S or, while Ray's GCS is down, longer.
    """

    def __init__(self, app_name: str):
        self._name = f"directory of {app_name}"
        self._handle: ActorHandle | None = None

    def ask(self, member: Member | None = None) -> View | None:
        """Tell of a member, if there is one; returns what the directory knows, None if it does not answer."""
        view = self._call("beat", None if member is None else msgspec.msgpack.encode(member))
        return None if view is None else msgspec.msgpack.decode(view, type=View)

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

    def _call(self, method: str, argument: object) -> Any:
        """The answer; None if there is none in time."""
        try:
            if self._handle is None:
                options = {"num_cpus": 0, "max_restarts": -1, "lifetime": "detached", "get_if_exists": True}
                actor: Any = ray.remote(DirectoryActor)
                self._handle = actor.options(name=self._name, namespace=NAMESPACE, **options).remote()
            return ray.get(getattr(self._handle, method).remote(argument), timeout=timeouts.DIRECTORY_S)
        except RayActorError:
            self._handle = None  # gone for good: the next call makes another one
        except Exception as error:
            logger.warning("the directory does not answer: %s", error or type(error).__name__)
        return None


class Membership:
    """A replica's part in the directory. It tells of the replica every REGISTER_S, until that has stopped.

    directory: where; that of the application if None. member: what the replica is now. on_view: called with what the
    directory knows. on_stop: ends the replica, by `stop_at` if it can; called once, when `stop_within` was.
    To be made in an event loop.
    """

    def __init__(
        self,
        directory: DirectoryLink,
        member: Callable[[], Member],
        on_view: Callable[[View], Awaitable[None]],
        on_stop: Callable[[], Awaitable[None]],
    ):
        self._directory, self._member, self._on_view, self._on_stop = directory, member, on_view, on_stop
        self.stop_at = math.inf  # time.monotonic()
        self._stopping: asyncio.Task[None] | None = None
        self._following = asyncio.create_task(self._follow())

    @property
    def is_stopping(self) -> bool:
        """Whether somebody has asked for that."""
        return self._stopping is not None

    async def announce(self) -> None:
        """Tell the directory at once what has changed."""
        await asyncio.to_thread(self._directory.ask, self._member())

    def stop_within(self, seconds: float) -> asyncio.Task[None]:
        """Have the replica end, and leave. Calling it again can only shorten the time."""
        self.stop_at = min(self.stop_at, time.monotonic() + seconds)
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop())
        return self._stopping

    async def _stop(self) -> None:
        await self._on_stop()
        self._following.cancel()
        await asyncio.to_thread(self._directory.leave, self._member().member_id)

    async def _follow(self) -> None:
        while True:
            try:
                view = await asyncio.to_thread(self._directory.ask, self._member())
                if view is not None:
                    await self._on_view(view)
                    if view.stop_in is not None:
                        self.stop_within(view.stop_in)
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
        return int(serve.get_replica_context().rank.rank)


def own_place() -> Place:
    """Of the Serve replica that runs in this process."""
    context = serve.get_replica_context()
    node_id = ray.get_runtime_context().get_node_id()
    return Place(context.app_name, context.replica_id.unique_id, node_id, ray.util.get_node_ip_address())


def address(host: str, port: int) -> str:
    """As URLs and HAProxy have it: "host:port", with brackets around IPv6 addresses."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
