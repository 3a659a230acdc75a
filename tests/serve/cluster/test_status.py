"""What `rayllm status` says of a cluster."""

from __future__ import annotations

import os
import subprocess

import msgspec
from support.launched import RAYLLM
from support.serve import engine_member

from rayllm.api.types import Load
from rayllm.serve.cluster.directory import Incident, Report, ServerMember
from rayllm.serve.cluster.status import Application, ClusterStatus, Host, describe

SERVER = ServerMember("api", "a" * 56, ["m"], "10.0.0.1:80")
ENGINE = engine_member("e", "b" * 56, index=1)
STATUS = ClusterStatus(
    hosts=[
        Host("c" * 56, "10.0.0.3", 8.0, 1.0, alive=False),
        Host("b" * 56, "10.0.0.2", 8.0, 1.0, alive=True, draining=True, leaves_in=29.6),
        Host("a" * 56, "10.0.0.1", 8.0, 0.0, alive=True, draining=True),
    ],
    applications=[
        Application(
            "rayllm",
            True,
            engines=[
                Report(
                    member=ENGINE,
                    version="1.2",
                    pid=7,
                    load=Load(3, 4000),
                    stop_in=24.9,
                    ranks=["node 10.0.0.2, process 8, cuda:0"],
                    num_recoveries=2,
                    recovery_seconds=0.25,
                )
            ],
            servers=[Report(member=SERVER, version="1.1", pid=9, load=Load(3, 4000))],
            incidents=[Incident(0.0, ENGINE, 0.125), Incident(0.0, engine_member("gone", "d" * 56), None)],
        ),
        Application("silent", False),
    ],
)


def test_it_says_what_there_is():
    lines = [line for line in describe(STATUS) if "last recoveries" not in line]
    times = [line[4:23] for line in lines if line.startswith("    19")]
    assert len(times) == 2
    assert [line.replace(times[0], "TIME") for line in lines] == [
        "hosts",
        "  10.0.0.1  8 CPUs, 0 GPUs  drains",
        "  10.0.0.2  8 CPUs, 1 GPUs  drains, goes in 30 s",
        "  10.0.0.3  8 CPUs, 1 GPUs  lost",
        "application rayllm",
        "  m replica 1  10.0.0.2  process 7  rayllm 1.2  3 live, 4,000 prompt tokens queued  workers replaced 2 times, "
        "0.2 s  drains, ends within 25 s",
        "    rank 0  node 10.0.0.2, process 8, cuda:0",
        "  API server 10.0.0.1:80  10.0.0.1  process 9  rayllm 1.1  3 live, 4,000 prompt tokens queued",
        "    TIME  m replica 1  10.0.0.2  its workers were replaced in 0.12 s",
        "    TIME  m replica 0  node dddddddddddd  lost",
        "application silent",
        "  its directory does not answer; it comes back on another host if its own is lost",
    ]


def test_it_is_json_too():
    assert msgspec.json.decode(msgspec.json.encode(STATUS))["applications"][0]["engines"][0]["load"] == {
        "completions": 3,
        "queued_tokens": 4000,
    }


def test_it_says_so_if_nothing_runs():
    environment = os.environ | {"RAY_ADDRESS": "127.0.0.1:1"}
    result = subprocess.run([RAYLLM, "status"], env=environment, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "error: RAY_ADDRESS 127.0.0.1:1: no Ray cluster answers there\n"
