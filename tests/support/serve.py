"""A directory without Ray, places in a cluster, and the metrics text of one engine."""

import math

from rayllm.api.wire import VERSION, CurveKeys, Endpoint
from rayllm.serve.cluster.directory import Directory, EngineMember, Place
from rayllm.serve.http.metrics import ModelFigures, render

KEYS = CurveKeys("p" * 40, "s" * 40)


class LocalDirectory:
    """A `DirectoryLink` to a Directory in this process."""

    def __init__(self, clock=None):
        self.directory = Directory() if clock is None else Directory(clock)

    def ask(self, member=None):
        return self.directory.beat(member)

    def tell(self, report):
        self.directory.tell(report)

    def decide(self, records):
        self.directory.decide(records)

    def leave(self, member_id):
        self.directory.leave(member_id)

    def stop(self, seconds):
        self.directory.stop(seconds)

    def remove(self):
        self.directory = Directory()


class FakePlace(Place):
    """Of a replica that Serve does not know."""

    replica_index = 0
    leaves_in = math.inf  # seconds

    def time_left(self):
        return self.leaves_in


def place(replica_id, node_id="here", leaves_in=math.inf):
    found = FakePlace("app", replica_id, node_id, "127.0.0.1")
    found.leaves_in = leaves_in
    return found


def engine_member(name, node_id="here", tcp="", index=0, draining=False, version=VERSION):
    endpoint = Endpoint(f"ipc://{name}", tcp, "k" * 40 if tcp else "")
    return EngineMember(name, "m", index, node_id, endpoint, draining, version)


def render_metrics(model_name, stats, front):
    """The Prometheus text of one model with one engine, or none (stats is None)."""
    engines = {} if stats is None else {"0": stats}
    return render([ModelFigures(model_name, engines, front, [], len(engines))])
