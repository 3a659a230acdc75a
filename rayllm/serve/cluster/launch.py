"""`start_server`: bring up Ray (or join a cluster), deploy models, stay until told to stop, leave nothing behind."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from rayllm import timeouts
from rayllm.api.types import DeviceMemory, EngineInfo, StartReport
from rayllm.config.options import ModelConfig, ServerConfig
from rayllm.config.resolved import resolve
from rayllm.errors import ConfigError, RayllmError
from rayllm.serve.cluster.deployment import Deployment, ReadyModel, Report
from rayllm.serve.cluster.processes import Orders, ignore_signals, supervise
from rayllm.serve.http.limits import KEY_VARIABLES, load_api_keys
from rayllm.serve.http.telemetry import trace_endpoint

GIB = 1 << 30
MAX_GPUS = 8  # that an engine may ask for

Options = tuple[list[ModelConfig], ServerConfig]


class Ready(NamedTuple):
    """A server that is up. phases: seconds that each phase of the start took."""

    url: str
    models: list[ReadyModel]
    phases: dict[str, float]


def describe_start(info: EngineInfo) -> list[str]:
    """Lines about an engine: where its ranks are, what their memory is for, how long each phase took."""
    report = info.start
    lines = [f"rank {rank}   {place}" for rank, place in enumerate(report.placement)]
    lines += [f"memory   {_describe_memory(report, i)}" for i in range(len(report.ready))]
    phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in report.phases)
    kind = "" if info.kv_cache_dtype == "auto" else f" in {info.kv_cache_dtype}"
    return [*lines, f"KV cache {info.num_kv_tokens:,} tokens{kind}", f"engine   {phases} s"]


def _describe_memory(report: StartReport, rank: int) -> str:
    memory: DeviceMemory = report.ready[rank].memory
    text = f"rank {rank}: weights {memory.weights / GIB:.2f} GiB, KV cache {memory.kv_cache / GIB:.2f} GiB"
    if not memory.allowed:
        return text
    rest = memory.in_use - memory.weights - memory.kv_cache
    return f"{text}, all else {rest / GIB:.2f} GiB; {memory.in_use / GIB:.2f} of {memory.allowed / GIB:.2f} GiB allowed"


def key_warnings(server: ServerConfig, *, has_keys: bool) -> list[str]:
    """What to tell who starts a server with these keys."""
    if server.api_key is not None:
        return [f"--api-key shows in the list of processes; use --api-key-file or {KEY_VARIABLES[1]}"]
    if not has_keys and server.host not in ("127.0.0.1", "localhost", "::1"):
        return [f"without API keys, whoever reaches {server.host} port {server.port} can use the server"]
    return []


def start_server(
    models: list[ModelConfig],
    server: ServerConfig,
    *,
    on_ready: Callable[[Ready], None],
    report: Report,
    reread: Callable[[], Options] | None = None,
    startup_timeout: float = timeouts.START_S,
) -> None:
    """Serve until SIGINT or SIGTERM; then drain, stop what was started here, and return.

    on_ready is called once; report with notes on progress. On SIGUSR1, the options that reread returns replace those of
    now, by a rolling update. Raises ConfigError, ModelError or StartupError if the server does not come up,
    EngineDeadError if Ray is lost later. Forks, so it is for a process that does nothing else: see `supervise`.
    """
    orders = supervise(timeouts.END_DESCENDANTS_S)
    phases: dict[str, float] = {}
    environment = {name: os.environ[name] for name in KEY_VARIABLES if name in os.environ}
    with _phase(phases, "checks"):
        _check(models)
        trace_endpoint(server.otlp_endpoint, os.environ)
        keys = load_api_keys(server, os.environ)
    for warning in key_warnings(server, has_keys=bool(keys)):
        report(warning)
    deployment = Deployment(server)

    def update() -> None:
        if reread is None:
            raise ConfigError("there is no --config file to read again")
        models, server = reread()
        _check(models)
        deployment.update(models, server, load_api_keys(server, dict(environment)))

    try:
        with _phase(phases, "ray"):
            deployment.join(models, report)
            ignore_signals()  # Ray has put a handler of its own in place
        with _phase(phases, "serve"):
            url = deployment.start(models, keys)
        with _phase(phases, "engine"):
            is_running = deployment.wait_until_running(orders.stop, report, startup_timeout)
        if is_running:
            on_ready(Ready(url, deployment.ready_models(), phases))
            watch(deployment, orders, report, update)
    finally:
        report("stopping")
        deployment.leave()


def watch(
    deployment: Deployment,
    orders: Orders,
    report: Report,
    update: Callable[[], None],
    status_s: float = timeouts.STATUS_S,
) -> None:
    """Return when told to stop, update when told to; report changes of the status. Raises EngineDeadError.

    status_s: how often to ask for the status.
    """
    last = "RUNNING"
    updating, next_status = False, 0.0
    while not orders.stop.wait(timeouts.INGRESS_WATCH_S):
        if orders.update.is_set():
            orders.update.clear()
            try:
                update()
                updating, next_status = True, 0.0
                report("updating")
            except RayllmError as error:
                report(f"the options stay as they are: {error}")
        deployment.watch_ingress()
        if time.monotonic() < next_status:
            continue
        next_status = time.monotonic() + status_s
        status, _, why = deployment.status()
        if status != last:
            report(f"the server is {status}" + (f": {why}" if status not in ("RUNNING", "DEPLOYING") else ""))
            last = status
        if updating and status != "DEPLOYING":
            updating = False
            report("updated" if status == "RUNNING" else "the update failed; the replicas that there were go on")


def _check(models: list[ModelConfig]) -> None:
    """All that can be known before Ray runs. Raises ConfigError or ModelError."""
    for model in models:
        resolve(model.engine, MAX_GPUS)


@contextmanager
def _phase(phases: dict[str, float], name: str) -> Iterator[None]:
    started = time.monotonic()
    yield
    phases[name] = time.monotonic() - started
