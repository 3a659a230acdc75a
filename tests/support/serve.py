"""A directory without Ray, places in a cluster, and the metrics text of one engine."""

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

    def leave(self, member_id):
        self.directory.leave(member_id)

    def stop(self, seconds):
        self.directory.stop(seconds)

    def remove(self):
        self.directory = Directory()


class FakePlace(Place):
    """Of a replica that Serve does not know."""

    replica_index = 0


def place(replica_id, node_id="here"):
    return FakePlace("app", replica_id, node_id, "127.0.0.1")


def engine_member(name, node_id="here", tcp="", index=0, draining=False, version=VERSION):
    endpoint = Endpoint(f"ipc://{name}", tcp, "k" * 40 if tcp else "")
    return EngineMember(name, "m", index, node_id, endpoint, draining, version)


def render_metrics(model_name, stats, front):
    """The Prometheus text of one model with one engine, or none (stats is None)."""
    engines = {} if stats is None else {"0": stats}
    return render([ModelFigures(model_name, engines, front, [], len(engines))])
