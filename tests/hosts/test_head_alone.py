"""The head dies for good, and no Redis has what its GCS knew."""

from __future__ import annotations

import json
import time

import pytest
from support.ray_hosts import OwnCluster, Streams

pytestmark = pytest.mark.timeout(600)  # for machines without a free core

STREAMS = 8
TOKENS = 400
SERVED_S = 90.0  # for at least so long; docs/operations.md says no more


@pytest.fixture(scope="module")
def cluster(hosts, laptop):
    cluster = OwnCluster(hosts, laptop, num_workers=2)
    cluster.launch("--num-replicas 2")
    return cluster


def ask(laptop, url):
    """Whether a request is answered."""
    body = {"model": "tiny-pydoc", "prompt": "Hello", "max_tokens": 4}
    curl = "curl --silent --max-time 10 --header 'content-type: application/json'"
    return '"usage"' in laptop.run(f"{curl} --data '{json.dumps(body)}' {url}/v1/completions", check=False)


def test_streams_and_new_requests_go_on(cluster, laptop, phases):
    """On the workers, which have engines, API servers and proxies of their own."""
    before = cluster.engines()
    urls = [cluster.url(name) for name in cluster.workers]
    running = Streams(laptop, urls=urls, count=STREAMS, max_tokens=TOKENS)
    cluster.head.stop()
    died = time.monotonic()
    results = running.results()
    assert [each.error for each in results if each.error] == []
    assert {each.num_tokens for each in results} == {TOKENS}
    phases.add("the head dies without Redis: longest gap of streams", max(each.longest_gap for each in results))
    while time.monotonic() - died < SERVED_S:
        assert all(ask(laptop, url) for url in urls)
        time.sleep(1)
    assert cluster.engines() == before
