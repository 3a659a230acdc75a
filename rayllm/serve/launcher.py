"""`start_server`: bring up Ray (or join a cluster), deploy one model, stay until told to stop, leave nothing behind."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import rayllm.errors
from rayllm.config import EngineConfig, ServerConfig
from rayllm.errors import ConfigError, EngineDeadError, RayllmError, StartupError
from rayllm.model_spec import check_parallel, load_model_spec
from rayllm.serve.auth import KEY_VARIABLES, ApiKey, load_api_keys
from rayllm.serve.processes import adopt_orphans, end_descendants
from rayllm.serve.tracing import trace_endpoint
from rayllm.types import DeviceMemory, EngineInfo, StartReport

APP_NAME = "rayllm"
GIB = 1 << 30
STARTUP_TIMEOUT_S = 1800.0
_POLL_S = 0.1
_WATCH_S = 2.0
_STOP_S = 20.0
_END_S = 2.0

Report = Callable[[str], None]

logger = logging.getLogger(__name__)


class Ready(NamedTuple):
    """A server that is up. phases: seconds that each phase of the start took. engine: how that came up."""

    url: str
    model_name: str
    phases: dict[str, float]
    engine: EngineInfo


def describe_start(info: EngineInfo) -> list[str]:
    """Lines about an engine: where its ranks are, what their memory is for, how long each phase took."""
    report = info.start
    lines = [f"rank {rank}   {place}" for rank, place in enumerate(report.placement)]
    lines += [f"memory   {_describe_memory(report, i)}" for i in range(len(report.memory))]
    phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in report.phases)
    return [*lines, f"KV cache {info.num_kv_tokens:,} tokens", f"engine   {phases} s"]


def _describe_memory(report: StartReport, rank: int) -> str:
    memory: DeviceMemory = report.memory[rank]
    text = f"rank {rank}: weights {memory.weights / GIB:.2f} GiB, KV cache {memory.kv_cache / GIB:.2f} GiB"
    if not memory.allowed:
        return text
    rest = memory.in_use - memory.weights - memory.kv_cache
    return f"{text}, all else {rest / GIB:.2f} GiB; {memory.in_use / GIB:.2f} of {memory.allowed / GIB:.2f} GiB allowed"


class Stopped(Exception):
    """SIGINT or SIGTERM came before the server was up."""


def check_before_start(engine: EngineConfig) -> EngineConfig:
    """All that can be known without Ray and torch. Returns the config with an absolute model path.

    Raises ConfigError or ModelError.
    """
    check_parallel(load_model_spec(engine.model), engine.tensor_parallel_size)
    if engine.tensor_parallel_size > 1 and engine.executor == "local":
        raise ConfigError(f"executor local runs one rank; tensor_parallel_size {engine.tensor_parallel_size} needs ray")
    return engine.model_copy(update={"model": str(Path(engine.model).resolve())})


def key_warnings(server: ServerConfig, *, has_keys: bool) -> list[str]:
    """What to tell who starts a server with these keys."""
    if server.api_key is not None:
        return [f"--api-key shows in the list of processes; use --api-key-file or {KEY_VARIABLES[1]}"]
    if not has_keys and server.host not in ("127.0.0.1", "localhost", "::1"):
        return [f"without API keys, whoever reaches {server.host} port {server.port} can use the server"]
    return []


def start_server(
    engine: EngineConfig,
    server: ServerConfig,
    *,
    on_ready: Callable[[Ready], None],
    report: Report,
    startup_timeout: float = STARTUP_TIMEOUT_S,
) -> None:
    """Serve until SIGINT or SIGTERM; then drain, stop what was started here, and return.

    on_ready is called once; report with notes on progress. Raises ConfigError, ModelError or StartupError if the
    server does not come up, EngineDeadError if Ray is lost later.
    """
    phases: dict[str, float] = {}
    with _StopSignals() as signals:
        with _phase(phases, "checks"):
            engine = check_before_start(engine)
            trace_endpoint(server.otlp_endpoint, os.environ)
            keys = load_api_keys(server, os.environ)
        for warning in key_warnings(server, has_keys=bool(keys)):
            report(warning)
        cluster = _Cluster(engine, server.drain_timeout)
        try:
            with _phase(phases, "ray"):
                cluster.join()
                signals.install()  # Ray has put its own handler in place
            with _phase(phases, "serve"):
                url, name = cluster.deploy(engine, server, keys)
            with _phase(phases, "engine"):
                cluster.wait_until_running(signals.stop, report, startup_timeout)
            on_ready(Ready(url, name, phases, cluster.engine_info()))
            cluster.watch(signals.stop, report)
        except (Stopped, SystemExit):  # while it starts, Ray turns SIGTERM into SystemExit
            pass
        finally:
            report("stopping")
            cluster.leave()


class _Cluster:
    """This process's use of a Ray cluster: its own, or one that was there."""

    def __init__(self, engine: EngineConfig, drain_timeout: float):
        self._engine = engine
        self._drain_timeout = drain_timeout
        self._owned = False
        self._deployed = self._running = False
        self._serve_was_running = False

    def join(self) -> None:
        """Connect, or start Ray on this machine. Raises StartupError."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        if self._engine.device == "cpu" or (self._engine.device == "auto" and not Path("/dev/nvidiactl").exists()):
            # Ray gives actors of a fraction of a core one OpenMP thread. CPU ranks want their share of the cores, less
            # one for the fronts: threads that spin for each other on a busy core make a step many times slower.
            threads = max(((os.cpu_count() or 1) - 1) // self._engine.tensor_parallel_size, 1)
            os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        adopt_orphans()
        from rayllm.ray_cluster import connect_to_ray

        self._owned = connect_to_ray()

    def deploy(self, engine: EngineConfig, server: ServerConfig, keys: list[ApiKey]) -> tuple[str, str]:
        """Start Serve and hand it the application, without waiting. Returns URL and model name. Raises ConfigError."""
        import ray
        from ray import serve
        from ray.serve.config import HTTPOptions, ProxyLocation

        from rayllm.serve.deployment import make_application, resolve_device, served_name

        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        if self._owned:
            server = with_port(server)
        if self._owned or engine.device == "auto":
            # A cluster that is not ours may scale up, so there only "auto" depends on what it has now.
            engine = resolve_device(engine, ray.cluster_resources().get("GPU", 0))
        running = {} if self._owned else _applications()
        self._serve_was_running = bool(running)
        if APP_NAME in running:
            raise ConfigError(f"this Ray cluster serves an application {APP_NAME!r} already; stop that first")
        serve.start(
            proxy_location=ProxyLocation.HeadOnly if self._owned else ProxyLocation.EveryNode,
            http_options=HTTPOptions(host=server.host, port=server.port),
        )
        self._deployed = True
        target = serve.RunTarget(target=make_application(engine, server, keys=keys), name=APP_NAME, route_prefix="/")
        try:
            serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
        except Exception as error:  # for instance, another application has the route
            raise StartupError(f"Ray Serve refuses the application: {_last_line(str(error))}") from None
        http = _http_options() or server  # a Serve that ran before keeps its own address
        host = "127.0.0.1" if http.host in (None, "0.0.0.0", "::", "") else http.host
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{http.port}", served_name(engine, server)

    def wait_until_running(self, stop: threading.Event, report: Report, timeout: float) -> None:
        """Raises what the replica raised when it was made, StartupError after the timeout, Stopped."""
        deadline = time.monotonic() + timeout
        note = ""
        while True:
            app = _applications().get(APP_NAME)
            if app is not None:
                if app.status == "RUNNING":
                    self._running = True
                    return
                messages = [app.message, *(deployment.message for deployment in app.deployments.values())]
                for message in messages:
                    if (error := startup_error(message)) is not None:
                        raise error
                if app.status == "DEPLOY_FAILED":
                    raise StartupError(_last_line(app.message))
                waiting = next((_first_line(m) for m in messages if "taken more than" in m), "")
                if waiting and waiting != note:
                    report(note := waiting)
            if time.monotonic() > deadline:
                raise StartupError(f"the engine was not up after {timeout:g} s" + (f": {note}" if note else ""))
            if stop.wait(_POLL_S):
                raise Stopped

    def engine_info(self) -> EngineInfo:
        """What the engine that runs says of itself. Raises StartupError if it does not answer."""
        from ray import serve

        try:
            handle = serve.get_deployment_handle("EngineReplica", APP_NAME)
            return handle.info.remote().result(timeout_s=_STOP_S)
        except Exception as error:
            raise StartupError(f"the engine started but does not answer: {_last_line(str(error))}") from None

    def watch(self, stop: threading.Event, report: Report) -> None:
        """Return when told to stop; report changes of the application's status. Raises EngineDeadError."""
        last = "RUNNING"
        while not stop.wait(_WATCH_S):
            try:
                app = _applications().get(APP_NAME)
            except Exception as error:
                raise EngineDeadError(f"Ray is gone: {_last_line(str(error))}") from None
            if app is None:
                raise EngineDeadError("the application was removed from Ray Serve")
            if app.status.value != last:
                last = app.status.value
                report(f"the server is {last}")

    def leave(self) -> None:
        """Remove the application; stop Ray too if it was started here, and Serve if it was not there before."""
        import ray
        from ray import serve

        try:
            if self._owned and self._running:
                # Ray's end takes everything else with it; the engine is told first, so that running requests may end.
                handle = serve.get_deployment_handle("EngineReplica", APP_NAME)
                handle.stop.remote().result(timeout_s=self._drain_timeout + _STOP_S)
            elif not self._owned and self._deployed:
                serve.delete(APP_NAME) if self._serve_was_running else serve.shutdown()
        except Exception as error:  # what follows must happen all the same
            logger.warning("stopping the server: %s", _last_line(str(error)))
        ray.shutdown()
        end_descendants(_END_S)


def startup_error(message: str) -> RayllmError | None:
    """The error in a deployment's status message, if it says that a replica's constructor raised.

    Errors of ours keep their class and text; of others the last line is kept, and where to look for more.
    """
    if "failed to start" not in message:
        return None
    ours = re.findall(r"^(?:rayllm\.errors\.)(\w+): (.*)$", message, re.MULTILINE)
    if ours:
        name, text = ours[-1]
        kind = getattr(rayllm.errors, name, StartupError)
        return kind(text) if issubclass(kind, ConfigError) else StartupError(text)
    return StartupError(f"{_last_line(message)} (Ray's logs have more: {_log_folder()})")


class _StopSignals:
    """While it lasts, SIGINT and SIGTERM set `stop`; a second one raises KeyboardInterrupt.

    Set, not raised: an exception out of the blue could leave Ray half started.
    """

    def __init__(self) -> None:
        self.stop = threading.Event()
        self._before: dict[int, Any] = {}

    def install(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            before = signal.signal(number, self._handle)
            self._before.setdefault(number, before)

    def __enter__(self) -> _StopSignals:
        self.install()
        return self

    def __exit__(self, *_exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, _number: int, _frame: Any) -> None:
        if self.stop.is_set():
            raise KeyboardInterrupt
        self.stop.set()


@contextmanager
def _phase(phases: dict[str, float], name: str) -> Iterator[None]:
    started = time.monotonic()
    yield
    phases[name] = time.monotonic() - started


def _applications() -> dict[str, Any]:
    from ray import serve

    return dict(serve.status().applications)


def _http_options() -> Any:
    """The HTTP options of the Serve that runs. Ray has no public call for them."""
    from ray.serve.context import _get_global_client

    client = _get_global_client()
    return None if client is None else client.http_config


def with_port(server: ServerConfig) -> ServerConfig:
    """The config with a port that this machine can listen on: port 0 becomes a free one. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    try:
        with socket.create_server((server.host, server.port), family=family) as probe:
            return server.model_copy(update={"port": int(probe.getsockname()[1])})
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"cannot listen on {server.host} port {server.port}: {reason}") from None


def _log_folder() -> str:
    import ray

    node = ray._private.worker._global_node
    return f"{node.get_logs_dir_path()}/serve" if node is not None else "/tmp/ray/session_latest/logs/serve"


def _first_line(text: str) -> str:
    return text.strip().split("\n")[0]


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return lines[-1] if lines else "no reason given"
