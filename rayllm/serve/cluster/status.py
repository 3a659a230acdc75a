"""The state of a cluster as a whole, for `rayllm status`: hosts, replicas, versions, loads, drains, what broke lately.

Members tell it to the directory (`directory.Report`), and Ray what hosts there are; nobody else is asked, so a host
that is silent holds up nothing.
"""

from __future__ import annotations

import math
from datetime import datetime
from typing import Any

import msgspec
import ray

from rayllm import timeouts
from rayllm.errors import EngineDeadError
from rayllm.executor.ray_compat import draining_nodes
from rayllm.serve.cluster.directory import DirectoryLink, EngineMember, Incident, Replica, Report, ServerMember


class Host(msgspec.Struct, frozen=True):
    """A node of the Ray cluster."""

    node_id: str
    address: str
    cpus: float
    gpus: float
    # As far as Ray has noticed.
    alive: bool
    draining: bool = False
    # Seconds until it goes; None if it does not, or nobody has said when.
    leaves_in: float | None = None


class Application(msgspec.Struct, frozen=True):
    """A deployment of rayllm."""

    # In Ray Serve.
    name: str
    # Whether its directory does; without it nothing else is known.
    answers: bool
    engines: list[Report] = []
    servers: list[Report] = []
    incidents: list[Incident] = []


class ClusterStatus(msgspec.Struct, frozen=True):
    """All of a Ray cluster."""

    hosts: list[Host]
    applications: list[Application]


def cluster_status() -> ClusterStatus:
    """Of the cluster that this process is connected to. Takes DIRECTORY_S for each directory that is silent.

    Raises EngineDeadError if Ray does not answer.
    """
    try:
        draining = draining_nodes(timeouts.DIRECTORY_S)
    except Exception as error:
        raise EngineDeadError(f"Ray's GCS does not answer: {error}") from None
    hosts = [_host(node, draining.get(node["NodeID"])) for node in ray.nodes()]
    return ClusterStatus(hosts, [_application(link) for link in DirectoryLink.all()])


def _host(node: dict[str, Any], leaves_in: float | None) -> Host:
    return Host(
        node_id=node["NodeID"],
        address=node["NodeManagerAddress"],
        cpus=node["Resources"].get("CPU", 0.0),
        gpus=node["Resources"].get("GPU", 0.0),
        alive=node["Alive"],
        draining=node["Alive"] and leaves_in is not None,
        leaves_in=leaves_in if leaves_in is not None and math.isfinite(leaves_in) else None,
    )


def _application(link: DirectoryLink) -> Application:
    status = link.status()
    if status is None:
        return Application(link.app_name, answers=False)
    reports = sorted(status.reports, key=lambda report: _name(report.member))
    engines = [each for each in reports if isinstance(each.member, EngineMember)]
    servers = [each for each in reports if isinstance(each.member, ServerMember)]
    return Application(link.app_name, True, engines, servers, status.incidents)


def describe(status: ClusterStatus) -> list[str]:
    """The lines that `rayllm status` prints."""
    addresses = {host.node_id: host.address for host in status.hosts}

    def where(member: Replica) -> str:
        return addresses.get(member.node_id, f"node {member.node_id[:12]}")

    lines = ["hosts"]
    for host in sorted(status.hosts, key=lambda host: (not host.alive, host.address)):
        state = "" if host.alive else "  lost"
        if host.draining:
            state = "  drains" if host.leaves_in is None else f"  drains, goes in {max(host.leaves_in, 0.0):.0f} s"
        lines.append(f"  {host.address}  {host.cpus:g} CPUs, {host.gpus:g} GPUs{state}")
    for app in status.applications:
        lines.append(f"application {app.name}")
        if not app.answers:
            lines.append("  its directory does not answer; it comes back on another host if its own is lost")
        for report in (*app.engines, *app.servers):
            lines.append(f"  {_describe(report, where(report.member))}")
            lines += [f"    rank {rank}  {place}" for rank, place in enumerate(report.ranks)]
        if app.incidents:
            lines.append("  last recoveries")
        for incident in app.incidents:
            what = "lost" if incident.seconds is None else f"its workers were replaced in {incident.seconds:.2f} s"
            at = datetime.fromtimestamp(incident.at).strftime("%Y-%m-%d %H:%M:%S")
            lines.append(f"    {at}  {_name(incident.member)}  {where(incident.member)}  {what}")
    return lines


def _name(member: Replica) -> str:
    if isinstance(member, EngineMember):
        return f"{member.model} replica {member.index}"
    return f"API server {member.address or 'behind Serve'}"


def _describe(report: Report, host: str) -> str:
    load = f"{report.load.completions:,} live, {report.load.queued_tokens:,} prompt tokens queued"
    parts = [_name(report.member), host, f"process {report.pid}", f"rayllm {report.version}", load]
    if report.num_recoveries:
        parts.append(f"workers replaced {report.num_recoveries} times, {report.recovery_seconds:.1f} s")
    if report.stop_in is not None:
        parts.append(f"drains, ends within {report.stop_in:.0f} s")
    return "  ".join(parts)
