"""Notices that a host goes, of stand-ins for the clouds' metadata services."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest
from support.driver import wait_for

from rayllm import timeouts
from rayllm.config.options import ServerConfig, make_config
from rayllm.errors import ConfigError
from rayllm.serve.cluster.spot import AwsNotices, GcpNotices, drain_at_notice, find_source


@contextmanager
def served(answer) -> Iterator[str]:
    """The URL of a server. answer: (method, path, query, headers) -> (status, headers, text)."""

    class Handler(BaseHTTPRequestHandler):
        def _answer(self):
            url = urlsplit(self.path)
            status, headers, text = answer(self.command, url.path, parse_qs(url.query), self.headers)
            self.send_response(status)
            for name, value in {**headers, "content-length": str(len(text))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = do_PUT = _answer

        def log_message(self, *_args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_notice_of_ec2():
    notice, status = [None], [200]

    def answer(method, path, _query, headers):
        if (method, path) == ("PUT", "/latest/api/token"):
            assert int(headers["x-aws-ec2-metadata-token-ttl-seconds"]) > 0
            return status[0], {}, "the token"
        assert (method, path) == ("GET", "/latest/meta-data/spot/instance-action")
        if headers["x-aws-ec2-metadata-token"] != "the token":
            return 401, {}, ""
        return (404, {}, "Not Found") if notice[0] is None else (200, {}, notice[0])

    with served(answer) as url:
        source = AwsNotices(url)
        assert source() is None
        at = datetime.now(UTC) + timedelta(seconds=120)
        notice[0] = f'{{"action": "terminate", "time": "{at:%Y-%m-%dT%H:%M:%SZ}"}}'
        assert 115 < source() <= 120
        status[0] = 403  # the service is switched off
        with pytest.raises(OSError, match="403"):
            source()


def test_a_notice_of_compute_engine():
    """The server waits until its value is another one than the client has seen."""
    value, changed = ["FALSE", 1], threading.Condition()

    def answer(method, path, query, headers):
        assert (method, path) == ("GET", "/computeMetadata/v1/instance/preempted")
        assert (headers["Metadata-Flavor"], query["wait_for_change"]) == ("Google", ["true"])
        with changed:
            changed.wait_for(lambda: query["last_etag"] != [str(value[1])], timeout=int(query["timeout_sec"][0]))
            return 200, {"ETag": str(value[1])}, value[0]

    with served(answer) as url:
        source = GcpNotices(url)
        assert source() is None, "at once"
        found = []
        waiting = threading.Thread(target=lambda: found.append(source()))
        waiting.start()
        waiting.join(0.1)
        assert waiting.is_alive()
        with changed:
            value[:] = ["TRUE", 2]
            changed.notify_all()
        waiting.join(10)
        assert found == [pytest.approx(30.0, abs=1.0)]
        assert GcpNotices(url)() == pytest.approx(30.0, abs=1.0), "also who asks for the first time"


def test_a_host_is_drained_once_also_if_asking_and_telling_fail_at_first(caplog):
    caplog.set_level(logging.WARNING, "ray.serve")
    said = iter([None, OSError("no route"), OSError("no route"), 60.0, 50.0])
    drains = []

    def source():
        if isinstance(found := next(said), OSError):
            raise found
        return found

    def drain(seconds):
        drains.append(seconds)
        if len(drains) == 1:
            raise RuntimeError("the GCS is down")

    drain_at_notice(source, drain, poll_s=0.0)
    assert drains == [60.0, 50.0]
    assert caplog.text.count("no route") == 1
    assert "the GCS is down" in caplog.text


def test_sources_by_name(tmp_path):
    vendor = tmp_path / "sys_vendor"
    assert find_source("auto", vendor) is None
    for text, kind in (("Amazon EC2\n", AwsNotices), ("Google\n", GcpNotices), ("QEMU\n", type(None))):
        vendor.write_text(text)
        assert isinstance(find_source("auto", vendor), kind)
    assert find_source("none", vendor) is None
    assert isinstance(find_source("aws", vendor), AwsNotices)
    assert find_source("time:monotonic", vendor)() > 0
    for name in ("no_such_module:f", "time:no_such_function"):
        with pytest.raises(ConfigError, match=f"spot_notices: {name} cannot be imported"):
            find_source(name, vendor)
    with pytest.raises(ConfigError, match=r"spot_notices.* must be auto, aws, gcp, none, or module:function"):
        make_config(ServerConfig, {"spot_notices": "azure"})


def test_a_notice_of_compute_engine_that_ray_did_not_take_is_given_again():
    value, changed, drains = ["FALSE", 1], threading.Condition(), []

    def answer(_method, _path, query, _headers):
        with changed:
            changed.wait_for(lambda: query["last_etag"] != [str(value[1])], timeout=int(query["timeout_sec"][0]))
            return 200, {"ETag": str(value[1])}, value[0]

    def change(*new):
        with changed:
            value[:] = new
            changed.notify_all()

    def drain(seconds):
        drains.append(seconds)
        if len(drains) == 1:
            raise RuntimeError("the GCS is down")

    with served(answer) as url:
        threading.Thread(target=drain_at_notice, args=(GcpNotices(url), drain, 0.1), daemon=True).start()
        change("TRUE", 2)
        wait_for(lambda: len(drains) == 2)
        change("TRUE", 3)
    assert timeouts.GCP_NOTICE_S - 5 < drains[1] < drains[0]
