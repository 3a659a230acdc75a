"""The directory of an application: who is there, and where. A small Ray actor that its members find by name.

It knows nothing but what its members say again every REGISTER_S, so one that is lost is simply made anew. No request
passes through it, and nobody stops using what he has because it is missing from the directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import ray
import zmq
from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from rayllm import timeouts
from rayllm.api.wire import CurveKeys, Endpoint

NAMESPACE = "rayllm"

logger = logging.getLogger("ray.serve")


class EngineMember(msgspec.Struct, frozen=True):
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


class ServerMember(msgspec.Struct, frozen=True):
    """An API server."""

    # Unique for each start.
    member_id: str
    # Ray's id of its node.
    node_id: str
    # Where it listens, "host:port"; empty if it does not listen itself.
    address: str = ""
    # It takes no new requests.
    draining: bool = False


Member = EngineMember | ServerMember


class View(msgspec.Struct, frozen=True):
    """What the directory knows."""

    engines: list[EngineMember]
    servers: list[ServerMember]
    # With which API servers identify themselves to engines on other nodes.
    front_keys: CurveKeys
    # Seconds until everything that still runs is to end; None if nobody has asked for that.
    stop_in: float | None = None


class Directory:
    """The actor. Entries go when their members leave, or have been silent for MEMBER_SILENCE_S."""

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
        )

    def leave(self, member_id: str) -> bool:
        """Remove a member; returns whether nobody is left."""
        self._members.pop(member_id, None)
        return not self._members

    def stop(self, seconds: float) -> None:
        """Tell all members to end within so many seconds, as soon as running requests are done."""
        self._stop_at = self._clock() + seconds


class DirectoryLink:
    """The way to the directory of an application, which is made if there is none."""

    def __init__(self, app_name: str):
        self._name = f"directory of {app_name}"
        self._handle: ActorHandle | None = None

    async def beat(self, member: Member) -> View | None:
        """Tell of a member; returns what the directory knows, None if it does not answer."""
        # Finding or making it asks the GCS, which must not hold up the event loop while that is down.
        return await asyncio.to_thread(self.ask, member)

    async def leave(self, member_id: str) -> None:
        """Say that a member goes. The last one takes the directory along."""

        def leave() -> None:
            if self._call("leave", member_id):
                self.remove()

        await asyncio.to_thread(leave)

    def ask(self, member: Member | None = None) -> View | None:
        """`beat`, for who has no event loop."""
        view: View | None = self._call("beat", member)
        return view

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
                actor: Any = ray.remote(Directory)
                self._handle = actor.options(name=self._name, namespace=NAMESPACE, **options).remote()
            return ray.get(getattr(self._handle, method).remote(argument), timeout=timeouts.DIRECTORY_S)
        except RayActorError:
            self._handle = None  # gone for good: the next call makes another one
        except Exception as error:
            logger.warning("the directory does not answer: %s", error or type(error).__name__)
        return None


async def follow(
    registry: DirectoryLink, member: Callable[[], Member], on_view: Callable[[View], Awaitable[None]]
) -> None:
    """Tell the directory of a member every REGISTER_S, and hand on what it knows; until cancelled."""
    while True:
        try:
            view = await registry.beat(member())
            if view is not None:
                await on_view(view)
        except Exception:
            logger.exception("following the directory")
        await asyncio.sleep(timeouts.REGISTER_S)
