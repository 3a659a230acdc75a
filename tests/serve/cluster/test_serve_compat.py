"""What `serve_compat` uses of Ray Serve beyond its public API is still there, and does what it did."""

from __future__ import annotations

import pytest
from ray import serve
from ray.serve.config import HTTPOptions, ProxyLocation

from rayllm.serve.cluster.serve_compat import serve_http_options, with_version


class Served:
    pass


def test_deployments_have_the_version_that_they_are_given():
    deployment = serve.deployment(name="d", num_replicas=2)(Served)
    first = with_version(deployment, "1")
    assert (first.version, with_version(first, "2").version) == ("1", "2")
    assert (first.name, first.num_replicas) == ("d", 2)


@pytest.fixture(scope="module")
def started(ray_cluster):
    serve.start(proxy_location=ProxyLocation.Disabled, http_options=HTTPOptions(host="127.0.0.9", port=8765))
    yield
    serve.shutdown()


def test_the_address_of_a_serve_that_runs(started):
    assert (serve_http_options().host, serve_http_options().port) == ("127.0.0.9", 8765)


class Leaving:
    """As replicas of ours are: Serve finds the end of an instance there, Python in the class."""

    def __init__(self, path):
        self._path = path
        self.__del__ = self._leave

    async def _leave(self):
        with open(self._path, "a", encoding="ascii") as file:
            file.write("left\n")


def test_serve_awaits_the_end_of_a_replica(started, tmp_path):
    application = serve.deployment(ray_actor_options={"num_cpus": 0.1})(Leaving).bind(str(tmp_path / "end"))
    serve.run(application, name="leaving", route_prefix=None)
    serve.delete("leaving")
    assert (tmp_path / "end").read_text() == "left\n"
