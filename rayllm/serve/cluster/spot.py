"""Notices that this host is about to be taken away (spot, preemptible): Ray is told to drain it, and requests move.

A source of notices returns the seconds until the host goes, None if nobody has said so. It may wait for news: a thread
of each replica and API server asks it again and again.
"""

from __future__ import annotations

import importlib
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from rayllm import timeouts
from rayllm.errors import ConfigError
from rayllm.executor.ray_compat import drain_node

Source = Callable[[], float | None]

_VENDORS = {"Amazon EC2": "aws", "Google": "gcp"}  # as a host's firmware says

logger = logging.getLogger("ray.serve")


class AwsNotices:
    """Of EC2's metadata service (IMDSv2), two minutes before a spot instance is stopped or ended.

    Its recommendations to rebalance are not followed: they say no time, and most instances stay for hours after one.
    """

    def __init__(self, url: str = "http://169.254.169.254"):
        self._url = f"{url}/latest"

    def __call__(self) -> float | None:
        lifetime = {"x-aws-ec2-metadata-token-ttl-seconds": "60"}
        _, token = _fetch(f"{self._url}/api/token", lifetime, method="PUT")
        try:
            _, notice = _fetch(f"{self._url}/meta-data/spot/instance-action", {"x-aws-ec2-metadata-token": token})
        except HTTPError as error:
            if error.code != 404:
                raise
            return None
        return (datetime.fromisoformat(json.loads(notice)["time"]) - datetime.now(UTC)).total_seconds()


class GcpNotices:
    """Of the metadata server of Compute Engine, which answers as soon as the host is preempted."""

    def __init__(self, url: str = "http://169.254.169.254"):
        self._url = f"{url}/computeMetadata/v1/instance/preempted"
        self._etag = "0"  # of the last answer: another one comes at once if the value has changed since
        self._goes_at: float | None = None  # time.monotonic()

    def __call__(self) -> float | None:
        query = f"wait_for_change=true&timeout_sec={timeouts.GCP_WAIT_S}&last_etag={self._etag}"
        headers, is_preempted = _fetch(f"{self._url}?{query}", {"Metadata-Flavor": "Google"}, timeouts.GCP_WAIT_S)
        if is_preempted.strip() != "TRUE":
            self._etag = headers["ETag"]
            return None
        self._etag = "0"  # who has to ask once more, as Ray did not listen, is answered at once
        self._goes_at = self._goes_at or time.monotonic() + timeouts.GCP_NOTICE_S
        return max(self._goes_at - time.monotonic(), 0.0)


_SOURCES: dict[str, Callable[[], Source]] = {"aws": AwsNotices, "gcp": GcpNotices}


def find_source(name: str, vendor: Path = Path("/sys/class/dmi/id/sys_vendor")) -> Source | None:
    """The source of the option `spot_notices`; None for none. vendor: the file with the maker of this host.

    Raises ConfigError.
    """
    if name == "auto":
        name = _VENDORS.get(vendor.read_text().strip(), "none") if vendor.exists() else "none"
    if name == "none":
        return None
    if name in _SOURCES:
        return _SOURCES[name]()
    module, _, function = name.partition(":")
    try:
        source: Source = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"spot_notices: {name} cannot be imported: {error}") from None
    return source


def watch_host(name: str, node_id: str) -> None:
    """Drain this host in Ray, of which it is node_id, when it is to go. name: of a source. Raises ConfigError."""
    if (source := find_source(name)) is not None:

        def drain(seconds: float) -> None:
            drain_node(node_id, seconds, "the cloud takes this host away", timeouts.DIRECTORY_S)

        threading.Thread(target=drain_at_notice, args=(source, drain), name="rayllm-spot", daemon=True).start()


def drain_at_notice(source: Source, drain: Callable[[float], None], poll_s: float = timeouts.SPOT_POLL_S) -> None:
    """Return when the source has said that the host goes, and `drain` has been called with the seconds."""
    last_error = ""
    while True:
        try:
            if (seconds := source()) is not None:
                logger.warning("this host goes away in %.0f s", seconds)
                drain(seconds)
                return
            last_error = ""
        except Exception as error:
            if str(error) != last_error:
                last_error = str(error)
                logger.warning("whether this host goes away cannot be asked, or Ray be told of it: %s", error)
        time.sleep(poll_s)


def _fetch(url: str, headers: Mapping[str, str], wait_s: float = 0.0, method: str = "GET") -> tuple[Any, str]:
    """(headers, text) of what a metadata service answers. Never through a proxy."""
    request = Request(url, headers=dict(headers), method=method)
    with build_opener(ProxyHandler({})).open(request, timeout=wait_s + timeouts.METADATA_S) as answer:
        return answer.headers, answer.read().decode()
