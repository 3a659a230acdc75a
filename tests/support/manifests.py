"""What the manifests of configs/kubernetes must be, of themselves, beside each other and beside rayllm's own options.

`check` raises Wrong for the first thing that is not so. A cluster finds most of these when it is too late: a label that
selects nothing, a probe of a port that nobody opens, a secret that nobody makes.
"""

from __future__ import annotations

import copy
import functools
import importlib
import json
import re
import shlex
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import click
import yaml
from jsonschema import Draft202012Validator
from ray.scripts.scripts import drain_node, start
from ray.serve.schema import ServeDeploySchema
from referencing import Registry, Resource

from rayllm import timeouts
from rayllm.config.options import ModelConfig, ServerConfig, check_names, make_models
from rayllm.errors import RayllmError

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "configs" / "kubernetes"
GUIDE = ROOT / "docs" / "kubernetes.md"
KUBERNETES = "1.31"  # the oldest one that has all fields
AGENT_PORT = 52365  # of Ray's agent on each node, where KubeRay asks for /api/healthz too
# Where a model's folder is in the pods, and the one that stands for it here: its config without weights.
MODEL_STAND_INS = {"/models/Llama-3.1-8B-Instruct": ROOT / "configs" / "models" / "llama-3.1-8b"}


class Wrong(Exception):
    """The manifests would not do what they are for."""


def load() -> list[dict[str, Any]]:
    """Every object of the kustomization's files, and the job beside them; the caller's own to change."""
    return copy.deepcopy(_read())


@functools.cache
def _read() -> list[dict[str, Any]]:
    names = [*yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["resources"], "download-model.yaml"]
    return [document for name in names for document in yaml.safe_load_all((FOLDER / name).read_text())]


def check(documents: list[dict[str, Any]]) -> None:
    """Raises Wrong. documents: as of `load`."""
    for document in documents:
        check_schema(document)
    objects = Objects(documents)
    for one in (
        *(check_serve_config, check_ports, check_selectors, check_volumes_and_secrets, check_gpus),
        *(check_disruptions_and_drains, check_fault_tolerance, check_security, check_metrics),
    ):
        one(objects)


def need(condition: object, message: str) -> None:
    if not condition:
        raise Wrong(message)


class Objects:
    """The manifests by kind, and their pods."""

    def __init__(self, documents: list[dict[str, Any]]):
        self._documents = documents
        self.ray = self.of("RayService")[0]["spec"]
        self.cluster = self.ray["rayClusterConfig"]
        self.head = self.cluster["headGroupSpec"]["template"]
        self.groups = self.cluster["workerGroupSpecs"]
        # By name, those of Ray first.
        self.pods = {"head": self.head, **{group["groupName"]: group["template"] for group in self.groups}}
        self.ray_pods = list(self.pods)
        for kind in ("StatefulSet", "Job"):
            self.pods |= {each["metadata"]["name"]: each["spec"]["template"] for each in self.of(kind)}
        self.claim_templates = {
            each["metadata"]["name"]: each["spec"]["volumeClaimTemplates"] for each in self.of("StatefulSet")
        }
        # KubeRay gives this one its selector: all pods of the cluster that are ready, without the head.
        self.services = [*self.of("Service"), self.ray["serveService"]]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [each for each in self._documents if each["kind"] == kind]

    def selected(self, selector: dict[str, Any]) -> list[str]:
        """Names of the pods that matchLabels, or a Service's selector, selects."""
        wanted = selector.get("matchLabels", selector).items()
        return [name for name, pod in self.pods.items() if wanted <= pod["metadata"]["labels"].items()]

    def containers(self, pod: str) -> list[dict[str, Any]]:
        return self.pods[pod]["spec"]["containers"]

    def ports(self, pod: str) -> dict[str | int, int]:
        """The ports of a pod, by name and by number."""
        found: dict[str | int, int] = {}
        for container in self.containers(pod):
            for port in container.get("ports", []):
                found[port["name"]] = found[port["containerPort"]] = port["containerPort"]
        return found

    def serve_config(self) -> dict[str, Any]:
        return yaml.safe_load(self.ray["serveConfigV2"])

    def application(self) -> dict[str, Any]:
        return self.serve_config()["applications"][0]

    def options(self) -> tuple[list[ModelConfig], ServerConfig]:
        return make_models(check_names(self.application()["args"]))


def check_schema(document: dict[str, Any]) -> None:
    """Unknown fields, wrong types and missing fields."""
    _check_text(json.dumps(document))


@functools.cache
def _check_text(text: str) -> None:
    """Of a document; those that a test has not changed are checked once."""
    document = json.loads(text)
    refuse_errors(find_validator(document["kind"], document["apiVersion"]), document)


def refuse_errors(validator: Draft202012Validator, document: dict[str, Any]) -> None:
    errors = [
        f"{'.'.join(map(str, error.absolute_path))}: {error.message[:200]}" for error in validator.iter_errors(document)
    ]
    need(not errors, f"{document['kind']} {'; '.join(errors[:9])}")


@functools.cache
def find_validator(kind: str, version: str) -> Draft202012Validator:
    folder = files("kubernetes_validate") / "kubernetes-json-schema" / f"v{KUBERNETES}.0-local-strict"
    definitions = Resource.from_contents(json.loads((folder / "_definitions.json").read_text()))
    registry = Registry().with_resources([("k8s", definitions), ("/api/_definitions.json", definitions)])
    custom = yaml.safe_load((Path(__file__).parents[1] / "config" / "custom_resources.yaml").read_text())
    group, _, number = version.rpartition("/")
    native = folder / f"{'-'.join(filter(None, [kind.lower(), group.partition('.')[0], number]))}.json"
    need(kind in custom or native.is_file(), f"there is no {kind} in {version}")
    schema = custom[kind] if kind in custom else json.loads(native.read_text())
    return Draft202012Validator(schema, registry=registry)


def check_ports(objects: Objects) -> None:
    for service in objects.services:
        name = service["metadata"]["name"]
        selector = service["spec"].get("selector")
        pods = objects.ray_pods[1:] if selector is None else objects.selected(selector)
        for port in service["spec"]["ports"]:
            for pod in pods:
                target = port.get("targetPort", port["port"])
                need(target in objects.ports(pod), f"Service {name}: pod {pod} has no port {target}")
    for pod in objects.pods:
        for container in objects.containers(pod):
            for kind in ("readinessProbe", "livenessProbe"):
                if get := container.get(kind, {}).get("httpGet"):
                    need(get["port"] in objects.ports(pod), f"{kind} of {pod}: no port {get['port']}")
    for policy in objects.of("NetworkPolicy"):
        for rule in policy["spec"]["ingress"]:
            for port in rule.get("ports", []):
                for pod in objects.selected(policy["spec"]["podSelector"]):
                    name = policy["metadata"]["name"]
                    need(port["port"] in objects.ports(pod), f"NetworkPolicy {name}: {pod} has no port {port['port']}")
    served = objects.serve_config()["http_options"]["port"]
    for pod in objects.ray_pods:
        need(objects.ports(pod).get("serve") == served, f"Serve listens on {served}, not on port serve of {pod}")
        need(objects.ports(pod).get("agent") == AGENT_PORT, f"Ray's agent listens on {AGENT_PORT} in {pod}")
        health = objects.containers(pod)[0]["livenessProbe"]["httpGet"]
        need(health == {"path": "/api/healthz", "port": "agent"}, f"livenessProbe of {pod} must ask Ray: {health}")
    for pod in objects.ray_pods[1:]:
        ready = objects.containers(pod)[0]["readinessProbe"]["httpGet"]
        need(re.fullmatch(r"/health(\?model=.+)?|/-/healthz", ready["path"]), f"{pod}: no such path {ready['path']}")
        need(ready["port"] == "serve", f"readinessProbe of {pod} must ask the API")
    need(objects.ray.get("excludeHeadPodFromServeSvc"), "the head has no replicas, and must not get traffic")


def _selectors(objects: Objects) -> Iterator[tuple[str, dict[str, Any]]]:
    for service in objects.of("Service"):
        yield f"Service {service['metadata']['name']}", service["spec"]["selector"]
    for budget in objects.of("PodDisruptionBudget"):
        yield "PodDisruptionBudget", budget["spec"]["selector"]
    for policy in objects.of("NetworkPolicy"):
        name = f"NetworkPolicy {policy['metadata']['name']}"
        yield name, policy["spec"]["podSelector"]
        for rule in policy["spec"]["ingress"]:
            for peer in rule.get("from", []):
                if "namespaceSelector" not in peer:
                    yield name, peer["podSelector"]
    for pod in objects.pods.values():
        for spread in pod["spec"].get("topologySpreadConstraints", []):
            yield "topologySpreadConstraints", spread["labelSelector"]


def check_selectors(objects: Objects) -> None:
    for name, selector in _selectors(objects):
        need(objects.selected(selector), f"{name} selects no pod: {selector}")
    for each in objects.of("StatefulSet"):
        name = each["metadata"]["name"]
        need(name in objects.selected(each["spec"]["selector"]), f"StatefulSet {name} does not select its own pod")
        need(each["spec"]["serviceName"] in {s["metadata"]["name"] for s in objects.services}, f"{name}: no Service")
    for monitor in objects.of("ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        services = [each for each in objects.services if wanted <= each["metadata"].get("labels", {}).items()]
        need(services == [objects.ray["serveService"]], f"ServiceMonitor selects not just the API's Service: {wanted}")
        names = {port["name"] for port in objects.ray["serveService"]["spec"]["ports"]}
        for endpoint in monitor["spec"]["endpoints"]:
            need(endpoint["port"] in names, f"ServiceMonitor: the Service has no port {endpoint['port']}")


def _references(value: Any, kinds: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Every mapping below `value` that is the value of a key of `kinds`."""
    if isinstance(value, dict):
        for key, below in value.items():
            if key in kinds and isinstance(below, dict):
                yield below
            yield from _references(below, kinds)
    elif isinstance(value, list):
        for below in value:
            yield from _references(below, kinds)


def documented_secrets() -> dict[str, set[str]]:
    """The keys of each secret that the guide has its reader make."""
    found = {}
    for name, rest in re.findall(
        r"create secret generic (\S+)(.*?)(?=\n    kubectl|\n\n)", GUIDE.read_text(), re.DOTALL
    ):
        found[name] = set(re.findall(r"--from-literal=(\w+)=", rest))
    return found


def check_volumes_and_secrets(objects: Objects) -> None:
    claims = {each["metadata"]["name"] for each in objects.of("PersistentVolumeClaim")}
    secrets = documented_secrets()
    for name, pod in objects.pods.items():
        volumes = {each["name"]: each for each in pod["spec"].get("volumes", [])}
        made = {each["metadata"]["name"] for each in objects.claim_templates.get(name, ())}
        mounts = [mount for container in objects.containers(name) for mount in container.get("volumeMounts", [])]
        for mount in mounts:
            need(mount["name"] in volumes or mount["name"] in made, f"pod {name} has no volume {mount['name']}")
        need(not set(volumes) - {mount["name"] for mount in mounts}, f"pod {name}: a volume that nothing mounts")
        need(len({mount["mountPath"] for mount in mounts}) == len(mounts), f"pod {name}: two volumes on one path")
        for claim in _references(pod, ("persistentVolumeClaim",)):
            need(claim["claimName"] in claims, f"pod {name}: no PersistentVolumeClaim {claim['claimName']}")
        for secret in _references(pod, ("secret",)):
            for item in secret["items"]:
                need(item["key"] in secrets.get(secret["secretName"], ()), f"the guide makes no secret {secret}")
    for document in [
        *objects.of("RayService"),
        *objects.of("StatefulSet"),
        *objects.of("Job"),
        *objects.of("ServiceMonitor"),
    ]:
        for reference in _references(document, ("secretKeyRef", "credentials")):
            known = reference["key"] in secrets.get(reference["name"], ())
            need(known, f"the guide makes no secret {reference['name']} with {reference['key']}")
    token = objects.cluster["authOptions"].get("secretName")
    need("auth_token" in secrets.get(token, ()), f"the guide makes no secret {token} with auth_token")
    for pod in objects.ray_pods:
        mounted = {mount["mountPath"]: mount["name"] for mount in objects.containers(pod)[0]["volumeMounts"]}
        volumes = {each["name"]: each for each in objects.pods[pod]["spec"]["volumes"]}
        shared = volumes[mounted.get("/dev/shm", "")] if "/dev/shm" in mounted else {}
        need(shared.get("emptyDir", {}).get("medium") == "Memory", f"pod {pod}: /dev/shm must be memory")
        has, memory = (
            int(each.removesuffix("Gi"))
            for each in (shared["emptyDir"]["sizeLimit"], objects.containers(pod)[0]["resources"]["limits"]["memory"])
        )
        need(has >= 0.3 * memory, f"pod {pod}: Ray's object store takes 0.3 of {memory} GiB, /dev/shm has {has}")


def _unknown(given: Any, parsed: Any, where: str = "") -> Iterator[str]:
    """What Serve ignores: names that its schema, which wants to be compatible with the future, has not."""
    if isinstance(given, dict) and isinstance(parsed, dict):
        for key, value in given.items():
            if key not in parsed:
                yield f"{where}{key}"
            elif key not in ("args", "runtime_env"):
                yield from _unknown(value, parsed[key], f"{where}{key}.")
    elif isinstance(given, list) and isinstance(parsed, list):
        for one, other in zip(given, parsed, strict=True):
            yield from _unknown(one, other, where)


def check_serve_config(objects: Objects) -> None:
    config = objects.serve_config()
    try:
        parsed = ServeDeploySchema.model_validate(config)
    except ValueError as error:
        raise Wrong(f"serveConfigV2: {error}") from None
    unknown = list(_unknown(config, parsed.model_dump(mode="json")))
    need(not unknown, f"serveConfigV2: Serve does not know {unknown}")
    need(len(config["applications"]) == 1, "serveConfigV2: one application")
    application = objects.application()
    module, _, name = application["import_path"].partition(":")
    try:
        build = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise Wrong(f"serveConfigV2: import_path: {error}") from None
    arguments = application["args"]
    ignored = {"host", "port", "ssl_certfile", "ssl_keyfile"} & set(arguments)
    need(not ignored, f"serveConfigV2: {ignored} are Serve's own here")
    model, keys = arguments.get("model", ""), arguments.get("api_key_file")
    for pod in objects.ray_pods:
        container, volumes = objects.containers(pod)[0], objects.pods[pod]["spec"]["volumes"]
        mounted = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        has_model = any(model.startswith(f"{path}/") for path in mounted)
        need(has_model, f"model {model} is on no volume of {pod}")
        paths = {
            f"{path}/{item['path']}"
            for path, volume in mounted.items()
            for each in volumes
            if each["name"] == volume and "secret" in each
            for item in each["secret"]["items"]
        }
        need(keys in paths, f"api_key_file {keys} is in no secret that {pod} mounts")
    need(
        any(
            model in each["command"]
            for job in objects.of("Job")
            for each in job["spec"]["template"]["spec"]["containers"]
        ),
        f"the job downloads another model than {model}",
    )
    try:
        build({**arguments, "model": str(MODEL_STAND_INS[model]), "api_key_file": None})
    except RayllmError as error:
        raise Wrong(f"serveConfigV2: args: {error}") from None


def _gpus(container: dict[str, Any]) -> int:
    return int(container["resources"].get("limits", {}).get("nvidia.com/gpu", 0))


def check_gpus(objects: Objects) -> None:
    models, server = objects.options()
    pods = {group["groupName"]: _gpus(objects.containers(group["groupName"])[0]) for group in objects.groups}
    for group in objects.groups:
        name, low, high = group["groupName"], group["minReplicas"], group["maxReplicas"]
        need(low <= group["replicas"] <= high, f"{name}: replicas must be between minReplicas and maxReplicas")
        resources = objects.containers(name)[0]["resources"]
        for resource in ("nvidia.com/gpu", "memory"):
            same = resources["limits"].get(resource) == resources["requests"].get(resource)
            need(same, f"{name}: {resource} must be the same in requests and limits")
        cpus = group["rayStartParams"]["num-cpus"]
        need(cpus == resources["requests"]["cpu"], f"{name}: num-cpus is {cpus}, not the CPUs that it requests")
    for group in (objects.cluster["headGroupSpec"], *objects.groups):
        parse_command(start, [f"--{k}" if v == "true" else f"--{k}={v}" for k, v in group["rayStartParams"].items()])
    need(_gpus(objects.containers("head")[0]) == 0, "the head has no use for GPUs")
    need(objects.cluster["headGroupSpec"]["rayStartParams"].get("num-cpus") == "0", "the head must have no replicas")
    for model in models:
        tp = model.engine.tensor_parallel_size
        need(max(pods.values()) >= tp, f"no pod has the {tp} GPUs of tensor_parallel_size")
    least = sum(model.engine.tensor_parallel_size * model.server.num_replicas for model in models)
    most = sum(
        model.engine.tensor_parallel_size * (model.server.max_replicas or model.server.num_replicas) for model in models
    )
    has = sum(pods[group["groupName"]] * group["replicas"] for group in objects.groups)
    may_have = sum(pods[group["groupName"]] * group["maxReplicas"] for group in objects.groups)
    need(least <= has, f"num_replicas needs {least} GPUs; the pods have {has}")
    need(most <= may_have, f"max_replicas needs {most} GPUs; the pods have {may_have} at most")
    most_pods = sum(group["maxReplicas"] for group in objects.groups)
    need((server.num_api_servers or 0) >= most_pods, f"num_api_servers: one for each of up to {most_pods} pods")


def parse_command(command: click.Command, arguments: list[str]) -> None:
    """Raises Wrong for options that a command of Ray has not. It is not run."""
    try:
        command.make_context(command.name, arguments)
    except click.ClickException as error:
        raise Wrong(f"ray {command.name}: {error.format_message()}") from None


def check_disruptions_and_drains(objects: Objects) -> None:
    _, server = objects.options()
    drain = max(server.drain_timeout, server.replica_drain_timeout) + timeouts.KILL_S
    for budget in objects.of("PodDisruptionBudget"):
        spec = budget["spec"]
        least = spec.get("minAvailable")
        need(isinstance(least, int), "Kubernetes counts minAvailable alone, as a number, for pods of KubeRay")
        selected = objects.selected(spec["selector"])
        pods = sum(group["minReplicas"] for group in objects.groups if group["groupName"] in selected)
        need(1 <= least < pods, f"the PodDisruptionBudget of {pods} pods must keep 1 to {pods - 1}, not {least}")
    delay = objects.ray["rayClusterDeletionDelaySeconds"]
    need(delay >= drain, f"rayClusterDeletionDelaySeconds {delay} is less than replicas may take to drain, {drain:g}")
    for group in objects.groups:
        pod = group["template"]["spec"]
        command = shlex.split(pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1])
        need(command[:2] == ["ray", "drain-node"], f"preStop of {group['groupName']} must drain the node")
        parse_command(drain_node, command[2 : command.index("&&")] if "&&" in command else command[2:])
        deadline = int(command[command.index("--deadline-remaining-seconds") + 1])
        need(
            deadline >= drain + 300, f"preStop: {deadline} s are too few to start replicas elsewhere, then {drain:g} s"
        )
        grace = pod["terminationGracePeriodSeconds"]
        need(
            grace >= deadline + 30,
            f"terminationGracePeriodSeconds {grace} is less than the deadline of preStop, {deadline}",
        )


def check_fault_tolerance(objects: Objects) -> None:
    options = objects.cluster.get("gcsFaultToleranceOptions", {})
    redis = {f"{s['metadata']['name']}:{p['port']}" for s in objects.of("Service") for p in s["spec"]["ports"]}
    need(options.get("redisAddress") in redis, f"redisAddress {options.get('redisAddress')} is no Service")
    passwords = [each for pod in objects.pods.values() for each in _references(pod, ("secretKeyRef",))]
    need(options["redisPassword"]["valueFrom"]["secretKeyRef"] in passwords, "Redis has another password")
    # As cluster.yaml has it for machines of one's own.
    starts = yaml.safe_load((ROOT / "cluster.yaml").read_text())["head_start_ray_commands"]
    wanted = dict(re.findall(r"(RAY_health_check_\w+)=(\d+)", " ".join(starts)))
    environment = {each["name"]: each.get("value") for each in objects.containers("head")[0]["env"]}
    need(len(wanted) == 3 and wanted.items() <= environment.items(), f"the head's health checks: {wanted}")
    scales = objects.cluster["autoscalerOptions"].get("version") == "v2" and objects.cluster["enableInTreeAutoscaling"]
    need(scales, "autoscaler v2 adds the pods that max_replicas needs")


def check_security(objects: Objects) -> None:
    need(objects.cluster["authOptions"].get("mode") == "token", "Ray must ask for its token")
    head = objects.cluster["headGroupSpec"]
    need(
        not head.get("enableIngress") and head.get("serviceType", "ClusterIP") == "ClusterIP",
        "the dashboard is exposed",
    )
    ports = [each["name"] for each in objects.ray["serveService"]["spec"]["ports"]]
    need(ports == ["serve"], f"the API's Service passes on {ports}")
    policies = objects.of("NetworkPolicy")
    covered = {pod for each in policies for pod in objects.selected(each["spec"]["podSelector"])}
    for name, pod in objects.pods.items():
        ports = objects.ports(name)
        need(not ports or name in covered, f"no NetworkPolicy is about {name}")
        settings = pod["spec"]["securityContext"]
        need(settings.get("runAsNonRoot") and settings.get("runAsUser"), f"{name} must not run as root")
        for container in objects.containers(name):
            own = container["securityContext"]
            closed = own.get("allowPrivilegeEscalation") is False and own["capabilities"]["drop"] == ["ALL"]
            need(closed, f"{name} must not gain privileges")
            need(
                "latest" not in container["image"] and ":" in container["image"], f"{name}: an image without a version"
            )
    for policy in policies:
        for rule in policy["spec"]["ingress"]:
            if "from" not in rule:
                open_to_all = [port["port"] for port in rule.get("ports", [])]
                need(
                    open_to_all == ["serve"], f"NetworkPolicy {policy['metadata']['name']} opens {open_to_all or 'all'}"
                )
    for pod in objects.ray_pods:
        environment = {each["name"]: each.get("value") for each in objects.containers(pod)[0]["env"]}
        need(environment.get("RAY_USAGE_STATS_ENABLED") == "0", f"{pod} sends usage statistics")
        need("RAY_AUTH_MODE" not in environment, f"{pod}: RAY_AUTH_MODE is for authOptions to set")


def check_metrics(objects: Objects) -> None:
    service = objects.ray["serveService"]
    for monitor in objects.of("ServiceMonitor"):
        for endpoint in monitor["spec"]["endpoints"]:
            need(endpoint["path"] == "/metrics", "the API's figures are at /metrics")
            target = next(each for each in endpoint["relabelings"] if each.get("targetLabel") == "__address__")
            port = service["spec"]["ports"][0]["port"]
            need(target["replacement"] == f"$1.svc:{port}", f"the Service's address has port {port}")
