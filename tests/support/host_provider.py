"""A Ray node provider whose hosts are namespaces: `provider: {type: external, module: host_provider.HostProvider}`.

The provider runs where Ray's autoscaler does, on test hosts; they make no hosts. It asks a `Supervisor`, in the process
of the tests, over HTTP on the hosts' bridge. On hosts this module is on its own, so it imports nothing of ours.
"""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ray.autoscaler.node_provider import NodeProvider

CALL_S = 60.0  # a host takes half a second


class HostProvider(NodeProvider):
    """provider_config: `supervisor` is its address, "IP:PORT"."""

    def non_terminated_nodes(self, tag_filters):
        return self._call("nodes", tag_filters)

    def is_running(self, node_id):
        return node_id in self._call("nodes", {})

    def is_terminated(self, node_id):
        return not self.is_running(node_id)

    def node_tags(self, node_id):
        return self._call("tags", node_id)

    def internal_ip(self, node_id):
        return self._call("ip", node_id)

    def external_ip(self, node_id):
        return self._call("ip", node_id)

    def create_node(self, node_config, tags, count):
        self._call("create", tags, count)

    def set_node_tags(self, node_id, tags):
        self._call("set_tags", node_id, tags)

    def terminate_node(self, node_id):
        self._call("terminate", node_id)

    @staticmethod
    def bootstrap_config(cluster_config):
        return cluster_config

    def _call(self, method: str, *arguments: Any) -> Any:
        data = json.dumps([method, *arguments]).encode()
        with urllib.request.urlopen(f"http://{self.provider_config['supervisor']}", data, timeout=CALL_S) as answer:
            return json.load(answer)


class Supervisor:
    """Makes and ends hosts for providers.

    hosts: a `hosts.Hosts`. Its hosts get the names n1, n2, ... and addresses that end in the same number; a number is
    not used twice. history: what was done, as (time.monotonic(), "create" or "terminate", name).
    """

    def __init__(self, hosts, address: str):
        self._hosts = hosts
        self._tags: dict[str, dict[str, str]] = {}
        self._last = 0
        self._lock = threading.Lock()
        self.history: list[tuple[float, str, str]] = []
        handler = type("Handler", (_Handler,), {"supervisor": self})
        self._server = ThreadingHTTPServer((address, 0), handler)
        self.address = f"{address}:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, name="supervisor", daemon=True).start()

    def close(self) -> None:
        """Take no more calls."""
        self._server.shutdown()
        self._server.server_close()

    def call(self, method: str, *arguments: Any) -> Any:
        """What a provider asks for. Raises KeyError for a method that is none."""
        calls = {
            "nodes": self.nodes,
            "tags": lambda name: self._tags.get(name, {}),
            "ip": lambda name: self._hosts[name].ip if name in self._tags else None,
            "create": self._create,
            "set_tags": lambda name, tags: self._tags[name].update(tags),
            "terminate": self._terminate,
        }
        with self._lock:
            return calls[method](*arguments)

    def nodes(self, tags: dict[str, str]) -> list[str]:
        """Names of the hosts that have these tags."""
        return [name for name, has in self._tags.items() if tags.items() <= has.items()]

    def _create(self, tags: dict[str, str], count: int) -> None:
        for _ in range(count):
            self._last += 1
            name = f"n{self._last}"
            self._hosts.start(name, self._last)
            self._tags[name] = dict(tags)
            self.history.append((time.monotonic(), "create", name))

    def _terminate(self, name: str) -> None:
        if name in self._tags:
            self.history.append((time.monotonic(), "terminate", name))  # before anybody can see that it is gone
            del self._tags[name]
            self._hosts.stop(name)


class _Handler(BaseHTTPRequestHandler):
    supervisor: Supervisor

    def do_POST(self) -> None:
        method, *arguments = json.loads(self.rfile.read(int(self.headers["content-length"])))
        try:
            status, result = 200, self.supervisor.call(method, *arguments)
        except Exception as error:
            status, result = 500, repr(error)
        body = json.dumps(result).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...
