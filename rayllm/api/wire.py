"""The messages between fronts and engines: msgspec structs in msgpack, one a ZeroMQ frame; nothing is ever unpickled.

An engine sends one `Deltas` a step and front. Beats carry what each side wants to know of the other: loads, metrics and
health. A front sends one when it has something new to say, at most every `timeouts.BEAT_S`, and at least every
`timeouts.IDLE_BEAT_S`; an engine answers each, and says at once that it drains or how its health has changed. To a
front with work it sends something every `timeouts.BEAT_S`, by which it notices that the connection has ended.
"""

from __future__ import annotations

import msgspec

from rayllm.api.types import Abort, EngineInfo, EngineStats, GenerationRequest, Load, TokenDelta

# Grows when a message changes so that a process of the version before would misunderstand it; fields that may be left
# out can come without. During an update of rayllm itself both are there, and front and engine of unlike versions do not
# talk to each other: each waits for one of its own.
VERSION = 1
MAX_FRONTS = 256  # whose metrics are kept, those that are gone included


class Endpoint(msgspec.Struct, frozen=True):
    """Where an engine listens, different for each start of it."""

    # ipc:// address of a Unix socket, for fronts on the same host.
    ipc: str
    # tcp:// address for fronts on other hosts; empty while there are none.
    tcp: str = ""
    # The engine's CURVE public key (Z85), by which fronts know it and encrypt; empty without a tcp address.
    public_key: str = ""


class CurveKeys(msgspec.Struct, frozen=True):
    """A CURVE key pair (Z85): what fronts identify themselves with on tcp."""

    public: str
    secret: str


# ---- front to engine


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The first message; the answer is Welcome or Dead."""

    # Unique for each start of a front; its beats come under it.
    front_id: str
    # As the front has it.
    version: int = VERSION


class Add(msgspec.Struct, frozen=True, tag=True):
    """Run a request. One that cannot be read is refused for itself alone, by its id."""

    request_id: str
    # A GenerationRequest in msgpack.
    request: msgspec.Raw


class Find(msgspec.Struct, frozen=True, tag=True):
    """Whether the engine has a request with this key; the answer is Found."""

    key_id: str


class Forget(msgspec.Struct, frozen=True, tag=True):
    """Nobody will come for the request with this key any more: it ends as soon as nobody wants its tokens."""

    key_id: str


class Aborts(msgspec.Struct, frozen=True, tag=True):
    """Stop these requests and completions; nothing more is sent for them.

    A request with a key goes on without this front, unless all of its completions are stopped one by one.
    """

    aborts: list[Abort]


class Snapshot(msgspec.Struct, frozen=True):
    """A front's metrics of one model."""

    # Grows with each snapshot of a front; 0 is none.
    number: int = 0
    # As `FrontMetrics.figures` makes them.
    figures: dict[str, float] = {}


def take_newer(known: dict[str, Snapshot], heard: dict[str, Snapshot]) -> dict[str, Snapshot]:
    """Bring what is known of fronts, by their ids, up to date; returns what was new.

    Those that changed least recently are forgotten beyond MAX_FRONTS.
    """
    newer = {key: each for key, each in heard.items() if each.number > known.get(key, Snapshot()).number}
    for key, each in newer.items():
        known.pop(key, None)
        known[key] = each
    while len(known) > MAX_FRONTS:
        del known[next(iter(known))]
    return newer


class FrontBeat(msgspec.Struct, frozen=True, tag=True):
    """Still here, with this much work."""

    # The work that this engine has of the front.
    here: Load = Load()
    # All of the front's work for the engine's model, which only engines are told that pass it on to the other fronts.
    total: Load | None = None
    # Front id -> its metrics, of this front and of others; passed on too.
    metrics: dict[str, Snapshot] = {}


class Bye(msgspec.Struct, frozen=True, tag=True):
    """Leaving; all requests of this front without a key are aborted."""


FrontMessage = Hello | Add | Find | Forget | Aborts | FrontBeat | Bye

# ---- engine to front


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The answer to Hello."""

    info: EngineInfo
    # As the engine has it.
    version: int = VERSION


class Deltas(msgspec.Struct, frozen=True, tag=True):
    """All that a step brought for this front's requests."""

    deltas: list[TokenDelta]


class Found(msgspec.Struct, frozen=True, tag=True):
    """The answer to Find."""

    key_id: str
    known: bool


class EngineBeat(msgspec.Struct, frozen=True, tag=True):
    """Still here, in this state."""

    stats: EngineStats = EngineStats()
    # Why the engine cannot do its work; None if it can.
    unhealthy: str | None = None
    # The engine is about to stop and should get no new requests.
    draining: bool = False
    # The work of all other fronts for this model, of those that have told it, and the part of it that this engine has.
    # Both with what is kept here for nobody.
    others_total: Load = Load()
    others_here: Load = Load()
    # Front id -> its metrics, of other fronts, also of those that are gone; only what is new since the last beat.
    metrics: dict[str, Snapshot] = {}


class Dead(msgspec.Struct, frozen=True, tag=True):
    """The engine does not serve this front any more; all the front's requests are over."""

    reason: str


EngineMessage = Welcome | Deltas | Found | EngineBeat | Dead


def pack_request(request: GenerationRequest) -> Add:
    """The message that adds a request."""
    return Add(request.request_id, msgspec.Raw(msgspec.msgpack.encode(request)))


def unpack_request(message: Add) -> GenerationRequest:
    """The request of an Add. Raises msgspec.ValidationError or msgspec.DecodeError if it cannot be read."""
    return msgspec.msgpack.decode(message.request, type=GenerationRequest)
