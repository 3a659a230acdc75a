"""The process groups that a driver shares with its ranks, and what travels on them.

Ranks of the control group: the driver is 0, TP rank r is r + 1. Plans travel on the control group, results on a group
of ranks 0 and 1, the model's collectives on the device group of ranks 1..tp, so no two threads ever share a group.
"""

from __future__ import annotations

import ipaddress
from datetime import timedelta
from typing import Any, NamedTuple

import msgspec
import psutil
import torch
import torch.distributed as dist

from rayllm import timeouts
from rayllm.api.types import StepPlan, StepResult
from rayllm.parallel.torch_compat import set_group_timeout

CONNECT_TIMEOUT = timedelta(seconds=timeouts.RANK_CONNECT_S)
DEVICE_TIMEOUT = timedelta(minutes=30)  # of the model's collectives; the driver's deadline for a step is shorter
FOREVER = timedelta(days=3650)  # an idle engine waits this long for its next plan

_PLANS = msgspec.msgpack.Decoder(StepPlan | None)
_RESULTS = msgspec.msgpack.Decoder(StepResult | None)
_FRAME_BYTES = 8192  # a result of 1,000 tokens without logprobs fits
_LENGTH_BYTES = 8


class Rendezvous(msgspec.Struct, frozen=True):
    """Where the driver and its ranks meet."""

    # Of the driver's TCPStore.
    host: str
    port: int
    # TP ranks.
    num_ranks: int
    # Of the device group, "nccl" or "gloo".
    device_backend: str


class Groups(NamedTuple):
    """One process's groups; None where it is no member. The device group is None also for a single rank."""

    control: dist.ProcessGroup
    results: dist.ProcessGroup | None
    device: dist.ProcessGroup | None


def interface_variables(host: str, own_address: str) -> dict[str, str]:
    """Environment variables that keep gloo and NCCL on the network of the rendezvous, seen from this node.

    host: of the rendezvous. own_address: this node's, in that network. Gloo would resolve the hostname, which need not
    lead to an address of this machine, or to any. Empty, so that they choose, if no interface here has the address.
    """
    own = host if ipaddress.ip_address(host).is_loopback else own_address
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == own for address in addresses):
            return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
    return {}


def join_groups(meeting: Rendezvous, rank: int, store: dist.TCPStore | None, idle_timeout: timedelta) -> Groups:
    """Create this process's groups; returns when all processes have. The control group becomes the process's default.

    rank: in the control group. store: the driver's own; ranks connect to it. idle_timeout: how long one wait on the
    control group may take from now on. Raises RuntimeError if another process does not come within CONNECT_TIMEOUT.
    """
    if store is None:
        store = dist.TCPStore(
            meeting.host, meeting.port, is_master=False, wait_for_workers=False, timeout=CONNECT_TIMEOUT
        )
    size = meeting.num_ranks + 1
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=CONNECT_TIMEOUT)
    control = dist.group.WORLD
    assert control is not None
    # All processes create all groups, members or not: names are counted, and have to be the same everywhere.
    results = dist.new_group([0, 1], backend="gloo", timeout=CONNECT_TIMEOUT)
    device = None
    if meeting.num_ranks > 1:
        device = dist.new_group(list(range(1, size)), backend=meeting.device_backend, timeout=DEVICE_TIMEOUT)
    # Only connecting has a short limit: gloo drops a connection whose wait times out, and engines may idle for days.
    set_group_timeout(control, idle_timeout)
    if rank <= 1:
        set_group_timeout(results, FOREVER)
    return Groups(control, results if rank <= 1 else None, device if rank >= 1 else None)


def pack(message: StepPlan | StepResult | None) -> bytes:
    """A message as the functions below send it; None is the end of the stream."""
    return msgspec.msgpack.encode(message)


def send_plan(groups: Groups, packed: bytes) -> None:
    """Send a packed plan from the driver to all ranks; returns when they take it. RuntimeError if one is gone."""
    dist.broadcast_object_list([packed], src=0, group=groups.control)


def receive_plan(groups: Groups) -> StepPlan | None:
    """A rank's side of `send_plan`: waits for the next plan."""
    packed: list[Any] = [None]
    dist.broadcast_object_list(packed, src=0, group=groups.control)
    return _PLANS.decode(packed[0])


def send_result(groups: Groups, packed: bytes) -> None:
    """Send a packed result from TP rank 0 to the driver; returns when it takes it. RuntimeError if it is gone.

    One message unless the result is long: half the time of an object list, which sends its size ahead.
    """
    message = len(packed).to_bytes(_LENGTH_BYTES, "little") + packed
    _broadcast(groups, bytearray(message[:_FRAME_BYTES].ljust(_FRAME_BYTES, b"\0")))
    if len(message) > _FRAME_BYTES:
        _broadcast(groups, bytearray(message[_FRAME_BYTES:]))


def receive_result(groups: Groups) -> StepResult | None:
    """The driver's side of `send_result`: waits for the next result."""
    message = _broadcast(groups, bytearray(_FRAME_BYTES))
    end = _LENGTH_BYTES + int.from_bytes(message[:_LENGTH_BYTES], "little")
    if end > _FRAME_BYTES:
        message = message + _broadcast(groups, bytearray(end - _FRAME_BYTES))
    return _RESULTS.decode(memoryview(message)[_LENGTH_BYTES:end])


def _broadcast(groups: Groups, frame: bytearray) -> bytearray:
    """The sender's frame, which fills the receiver's."""
    dist.broadcast(torch.frombuffer(frame, dtype=torch.uint8), src=1, group=groups.results)
    return frame
