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


@pytest.fixture
def started(ray_cluster):
    serve.start(proxy_location=ProxyLocation.Disabled, http_options=HTTPOptions(host="127.0.0.9", port=8765))
    yield
    serve.shutdown()


def test_the_address_of_a_serve_that_runs(started):
    assert (serve_http_options().host, serve_http_options().port) == ("127.0.0.9", 8765)
