"""configs/kubernetes and the Dockerfile, as far as a machine without a cluster and without Docker can try them."""

import base64
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator
from packaging.requirements import Requirement
from support.manifests import FOLDER, GUIDE, ROOT, Wrong, check, check_schema, documented_secrets, load, refuse_errors

from rayllm.config.options import ServerConfig
from rayllm.serve.http.auth import check_key, load_api_keys

GONE = object()
PODS = "spec.rayClusterConfig"
HEAD = f"{PODS}.headGroupSpec"
GROUP = f"{PODS}.workerGroupSpecs.0"
HEAD_CONTAINER = f"{HEAD}.template.spec.containers.0"
CONTAINER = f"{GROUP}.template.spec.containers.0"
APPLICATION = "spec.serveConfigV2.applications.0"
DRAIN = "ray drain-node --reason DRAIN_NODE_REASON_PREEMPTION --reason-message x"
PRE_STOP = f"{CONTAINER}.lifecycle.preStop.exec.command.2"


def test_the_manifests_are_right():
    check(load())


def mutated(kind, path, value):
    """The manifests with another value at a path of the first object of a kind; below serveConfigV2, of its YAML."""
    documents = load()
    document = next(each for each in documents if each["kind"] == kind)
    _, dot, inner = path.partition(".serveConfigV2.")
    if not dot:
        put(document, path, value)
    else:
        config = yaml.safe_load(document["spec"]["serveConfigV2"])
        put(config, inner, value)
        document["spec"]["serveConfigV2"] = yaml.safe_dump(config)
    return documents


def put(value, path, new):
    *way, last = [int(part) if part.isdecimal() else part for part in path.split(".")]
    for part in way:
        value = value[part]
    if new is GONE:
        del value[last]
    elif isinstance(new, str) and new.startswith("-> "):
        value[new.removeprefix("-> ")] = value.pop(last)
    else:
        value[last] = new


SCHEMA = [  # misspelt ("-> name"), missing or of a wrong type
    ("RayService", "apiVersion", "ray.io/v2", "ray.io/v1"),
    ("RayService", PODS, "-> rayClusterSpec", "rayClusterSpec"),
    ("RayService", "spec.serveConfigV2", "-> serveConfig", "serveConfig"),
    ("RayService", "spec.serveConfigV2", {"applications": []}, "string"),
    ("RayService", "spec.excludeHeadPodFromServeSvc", "yes", "boolean"),
    ("RayService", f"{PODS}.authOptions.mode", "tokens", "tokens"),
    ("RayService", f"{PODS}.gcsFaultToleranceOptions.redisAddress", "-> redisAdress", "redisAdress"),
    ("RayService", f"{HEAD}.rayStartParams.num-cpus", 0, "string"),
    ("RayService", f"{HEAD}.template", GONE, "template"),
    ("RayService", f"{GROUP}.maxReplicas", "4", "integer"),
    ("RayService", f"{GROUP}.minReplicas", GONE, "minReplicas"),
    ("RayService", f"{CONTAINER}.readinessProbe.httpGet", "-> httpGetAction", "httpGetAction"),
    ("RayService", f"{CONTAINER}.livenessProbe.periodSeconds", "5s", "integer"),
    ("RayService", f"{CONTAINER}.name", GONE, "name"),
    ("RayService", f"{CONTAINER}.env.0.value", 0, "string"),
    ("RayService", f"{CONTAINER}.lifecycle.preStop", "-> prestop", "prestop"),
    ("RayService", f"{GROUP}.template.spec.terminationGracePeriodSeconds", "-> terminationGracePeriod", "GracePeriod"),
    ("ServiceMonitor", "spec.endpoints.0.interval", "often", "often"),
    ("ServiceMonitor", "spec.endpoints.0.bearerToken", "secret", "bearerToken"),
    ("ServiceMonitor", "spec.selector", GONE, "selector"),
    ("PodDisruptionBudget", "spec.minAvailable", "-> minimumAvailable", "minimumAvailable"),
    ("PodDisruptionBudget", "apiVersion", "policy/v1beta1", "policy/v1beta1"),
    ("StatefulSet", "spec.selector", GONE, "selector"),
    ("StatefulSet", "spec.replicas", "one", "integer"),
    ("Service", "spec.ports.0.port", GONE, "port"),
    ("NetworkPolicy", "spec.ingress.0.from.0.podSelector.matchLabel", {}, "matchLabel"),
    ("PersistentVolumeClaim", "spec.accessModes", "ReadWriteMany", "array"),
    ("Job", "spec.template.spec.containers.0.image", 1, "string"),
]
MEANING = [
    # Serve's config and our options.
    ("RayService", f"{APPLICATION}.import_path", "rayllm.serve:build", "import_path"),
    ("RayService", f"{APPLICATION}.import_path", "rayllm.server:build_app", "import_path"),
    ("RayService", f"{APPLICATION}.import_path", GONE, "import_path"),
    ("RayService", f"{APPLICATION}.route_prefix", "-> prefix", r"\['applications.prefix'\]"),
    ("RayService", "spec.serveConfigV2.http_options", "-> http", r"\['http'\]"),
    ("RayService", "spec.serveConfigV2.proxy_location", "Everywhere", "proxy_location"),
    ("RayService", f"{APPLICATION}.args.max_model_len", "-> max_model_length", "max_model_length"),
    ("RayService", f"{APPLICATION}.args.max_model_len", "long", "max_model_len"),
    ("RayService", f"{APPLICATION}.args.max_replicas", 1, "max_replicas"),
    ("RayService", f"{APPLICATION}.args.api_key", "secret", "api_key"),
    ("RayService", f"{APPLICATION}.args.ingress", "haproxy", "ingress"),
    ("RayService", f"{APPLICATION}.args.port", 8000, "Serve's own"),
    ("RayService", f"{APPLICATION}.args.model", "/models/Qwen3-32B", "downloads another model"),
    ("RayService", f"{APPLICATION}.args.model", "/model/Llama-3.1-8B-Instruct", "on no volume"),
    ("RayService", f"{APPLICATION}.args.api_key_file", "/etc/rayllm/key", "api_key_file"),
    # Ports and probes.
    ("RayService", "spec.serveConfigV2.http_options.port", 8080, "Serve listens on 8080"),
    ("RayService", "spec.serveService.spec.ports.0.targetPort", 8001, "no port 8001"),
    ("RayService", f"{CONTAINER}.ports.0.name", "http", "no port serve"),
    ("RayService", f"{CONTAINER}.readinessProbe.httpGet.port", 8888, "no port 8888"),
    ("RayService", f"{CONTAINER}.readinessProbe.httpGet.path", "/healthy", "no such path /healthy"),
    ("RayService", f"{CONTAINER}.livenessProbe.httpGet.path", "/health", "livenessProbe"),
    ("RayService", f"{CONTAINER}.ports.1.containerPort", 52366, "52365"),
    ("RayService", "spec.excludeHeadPodFromServeSvc", False, "the head"),
    ("Service", "spec.ports.0.targetPort", 6380, "no port 6380"),
    ("NetworkPolicy", "spec.ingress.1.ports.0.port", 8266, "no port 8266"),
    ("ServiceMonitor", "spec.endpoints.0.port", "metrics", "no port metrics"),
    ("ServiceMonitor", "spec.endpoints.0.path", "/metric", "/metrics"),
    ("ServiceMonitor", "spec.endpoints.0.relabelings.0.replacement", "$1.svc:80", "port 8000"),
    # Selectors.
    ("Service", "spec.selector", {"app": "redis"}, "selects no pod"),
    ("PodDisruptionBudget", "spec.selector.matchLabels", {"app": "rayllm"}, "selects no pod"),
    ("NetworkPolicy", "spec.podSelector.matchLabels", {"app": "rayllm"}, "selects no pod"),
    ("NetworkPolicy", "spec.ingress.0.from.0.podSelector.matchLabels", {"app": "rayllm"}, "selects no pod"),
    ("StatefulSet", "spec.template.metadata.labels", {"app.kubernetes.io/part-of": "rayllm"}, "selects no pod"),
    ("StatefulSet", "spec.serviceName", "redis", "no Service"),
    ("ServiceMonitor", "spec.selector.matchLabels", {"app": "rayllm"}, "not just the API's Service"),
    # Volumes and secrets.
    ("PersistentVolumeClaim", "metadata.name", "models", "no PersistentVolumeClaim rayllm-models"),
    ("RayService", f"{CONTAINER}.volumeMounts.0.name", "checkpoints", "no volume checkpoints"),
    ("RayService", f"{CONTAINER}.volumeMounts.2", GONE, "nothing mounts"),
    ("RayService", f"{GROUP}.template.spec.volumes.2.emptyDir", {}, "/dev/shm must be memory"),
    ("RayService", f"{PODS}.authOptions.secretName", "ray-token", "no secret ray-token"),
    ("StatefulSet", "spec.template.spec.containers.0.env.0.valueFrom.secretKeyRef.key", "pass", "with pass"),
    ("ServiceMonitor", "spec.endpoints.0.authorization.credentials.name", "keys", "no secret keys"),
    # GPUs.
    ("RayService", f"{APPLICATION}.args.tensor_parallel_size", 4, "no pod has the 4 GPUs"),
    ("RayService", f"{APPLICATION}.args.num_replicas", 3, "num_replicas needs 3 GPUs"),
    ("RayService", f"{APPLICATION}.args.max_replicas", 5, "max_replicas needs 5 GPUs"),
    ("RayService", f"{APPLICATION}.args.num_api_servers", 2, "num_api_servers"),
    ("RayService", f"{CONTAINER}.resources.limits.memory", "40Gi", "the same in requests and limits"),
    ("RayService", f"{GROUP}.rayStartParams.num-cpus", "16", "num-cpus"),
    ("RayService", f"{GROUP}.replicas", 5, "replicas must be between"),
    ("RayService", f"{HEAD}.rayStartParams.num-cpus", "2", "the head must have no replicas"),
    # Drains and disruptions.
    ("PodDisruptionBudget", "spec.minAvailable", 2, "must keep 1 to 1, not 2"),
    ("PodDisruptionBudget", "spec.minAvailable", 0, "must keep 1 to 1, not 0"),
    ("PodDisruptionBudget", "spec.minAvailable", "50%", "as a number"),
    ("PodDisruptionBudget", "spec.minAvailable", "-> maxUnavailable", "minAvailable alone"),
    ("RayService", "spec.rayClusterDeletionDelaySeconds", 60, "rayClusterDeletionDelaySeconds 60"),
    ("RayService", f"{APPLICATION}.args.replica_drain_timeout", 900, "rayClusterDeletionDelaySeconds 660"),
    ("RayService", f"{GROUP}.template.spec.terminationGracePeriodSeconds", 30, "terminationGracePeriodSeconds 30"),
    ("RayService", PRE_STOP, "sleep 30", "preStop"),
    ("RayService", PRE_STOP, "ray drain-node --reason DELETED --reason-message x", "'DELETED' is not one of"),
    ("RayService", PRE_STOP, f"{DRAIN} --deadline-remaining-seconds 600", "600 s are too few"),
    # The head.
    (
        "RayService",
        f"{HEAD}.rayStartParams.disable-usage-stats",
        "-> no-usage-stats",
        "No such option .--no-usage-stats",
    ),
    ("RayService", f"{HEAD}.rayStartParams.num-cpus", "none", "not a valid integer"),
    ("RayService", f"{HEAD}.template.spec.volumes.2.emptyDir.sizeLimit", "2Gi", "/dev/shm has 2"),
    ("RayService", f"{PODS}.gcsFaultToleranceOptions.redisAddress", "redis:6379", "redis:6379 is no Service"),
    ("RayService", f"{HEAD_CONTAINER}.env.2.value", "5000", "health checks"),
    ("RayService", f"{PODS}.enableInTreeAutoscaling", False, "autoscaler v2"),
    # What strangers must not have.
    ("RayService", f"{PODS}.authOptions.mode", "disabled", "token"),
    ("RayService", f"{HEAD}.serviceType", "LoadBalancer", "the dashboard is exposed"),
    ("RayService", f"{HEAD}.enableIngress", True, "the dashboard is exposed"),
    ("RayService", f"{CONTAINER}.env.0.value", "1", "usage statistics"),
    ("RayService", f"{CONTAINER}.image", "rayllm:latest", "without a version"),
    ("RayService", f"{HEAD}.template.spec.securityContext.runAsNonRoot", False, "as root"),
    ("RayService", f"{CONTAINER}.securityContext.allowPrivilegeEscalation", True, "privileges"),
    ("NetworkPolicy", "spec.ingress.1.from", GONE, "opens"),
]


@pytest.mark.parametrize(("kind", "path", "value", "message"), SCHEMA + MEANING)
def test_a_wrong_manifest_is_refused(kind, path, value, message):
    with pytest.raises(Wrong, match=message):
        check(mutated(kind, path, value))


# CustomResourceDefinitions as their projects publish them, in this folder; they are not part of this repository.
DEFINITIONS = os.environ.get("RAYLLM_TEST_CRDS")
FILES = {"RayService": "ray.io_rayservices.yaml", "ServiceMonitor": "monitoring.coreos.com_servicemonitors.yaml"}


def strict(schema):
    """A definition's schema with unknown fields refused, as `kubectl apply` refuses them."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    new = {key: strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        new.setdefault("additionalProperties", False)
    return new


@pytest.mark.skipif(DEFINITIONS is None, reason="RAYLLM_TEST_CRDS names no folder with the CustomResourceDefinitions")
def test_the_published_definitions_agree():
    """What they accept and refuse is what our own schemas accept and refuse."""
    schemas = {}
    for kind, name in FILES.items():
        definition = yaml.load((Path(DEFINITIONS) / name).read_text(), yaml.CSafeLoader)
        version = next(each for each in definition["spec"]["versions"] if each["storage"])
        schema = strict(version["schema"]["openAPIV3Schema"])
        schema["properties"]["apiVersion"] = {"const": f"{definition['spec']['group']}/{version['name']}"}
        schemas[kind] = Draft202012Validator(schema)
    for document in load():
        if document["kind"] in schemas:
            refuse_errors(schemas[document["kind"]], document)
    tried = 0
    for kind, path, value, _ in SCHEMA:
        if kind in schemas:
            documents = mutated(kind, path, value)
            with pytest.raises(Wrong):
                refuse_errors(schemas[kind], next(each for each in documents if each["kind"] == kind))
            tried += 1
    assert tried >= 15


def kubectl(*arguments):
    program = shutil.which("kubectl")
    if program is None:
        pytest.skip("kubectl is not installed")
    return subprocess.run([program, *arguments], check=True, capture_output=True, text=True, timeout=60).stdout


def test_the_kustomization_builds():
    built = list(yaml.safe_load_all(kubectl("kustomize", str(FOLDER))))
    boards = [each for each in built if each["kind"] == "ConfigMap"]
    assert [json.loads(each["data"]["grafana-dashboard.json"])["uid"] for each in boards] == ["rayllm"]
    assert boards[0]["metadata"]["labels"] == {"grafana_dashboard": "1"}
    assert {each["metadata"]["namespace"] for each in built} == {"rayllm"}
    check([*built, next(each for each in load() if each["kind"] == "Job")])


def test_every_file_is_part_of_it():
    kustomization = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
    named = {*kustomization["resources"], *kustomization["configMapGenerator"][0]["files"]}
    assert {path.name for path in FOLDER.iterdir()} == named | {"kustomization.yaml", "download-model.yaml"}
    images = {name["name"]: name["newTag"] for name in kustomization["images"]}
    for container in [c for each in load() for c in containers(each)]:
        if container["image"].startswith("rayllm"):
            assert container["image"] == f"rayllm:{images['rayllm']}"


def containers(value):
    if isinstance(value, dict):
        yield from value.get("containers", [])
        value = list(value.values())
    for below in value if isinstance(value, list) else []:
        yield from containers(below)


def test_the_secrets_of_the_guide_fit(tmp_path):
    """Its own commands make them, with keys that our API takes, Prometheus's among them."""
    assert set(documented_secrets()) == {"rayllm-ray-token", "rayllm-redis", "rayllm-api-keys", "rayllm-hugging-face"}
    kubectl("version", "--client")
    commands = re.findall(
        r"^    (\w+=\$\(openssl.*|kubectl.* create secret (?:.*\\\n)*.*)", GUIDE.read_text(), re.MULTILINE
    )
    script = "\n".join([*commands, ""]).replace("create secret", "create --dry-run=client -o yaml secret")
    script = script.replace("kubectl", "echo ---; kubectl")
    done = subprocess.run(
        ["bash", "-euc", script],
        env={**os.environ, "HF_TOKEN": "hf"},
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    secrets = {each["metadata"]["name"]: each for each in yaml.safe_load_all(done.stdout) if each}
    assert set(secrets) == set(documented_secrets())
    for name, secret in secrets.items():
        check_schema(secret | {"metadata": {"name": name}})  # kubectl's own creationTimestamp is null
        assert set(secret["data"]) == documented_secrets()[name]
    data = {key: base64.b64decode(value).decode() for key, value in secrets["rayllm-api-keys"]["data"].items()}
    (tmp_path / "keys").write_text(data["keys"])
    keys = load_api_keys(ServerConfig(api_key_file=str(tmp_path / "keys")), {})
    assert [key.name for key in keys] == ["first-client", "prometheus"]
    assert check_key(keys, "GET", "/metrics", f"Bearer {data['prometheus']}") == "prometheus"
    password = base64.b64decode(secrets["rayllm-redis"]["data"]["password"]).decode()
    assert password.isalnum(), "Redis reads it as one word of a configuration"


def test_redis_asks_for_its_password(tmp_path):
    """The container's own command, but for the port and the folder."""
    if not shutil.which("redis-server"):
        pytest.skip("redis-server is not installed")
    document = next(each for each in load() if each["kind"] == "StatefulSet")
    container = document["spec"]["template"]["spec"]["containers"][0]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    [script] = container["args"]
    assert script.startswith("exec redis-server - --dir /data ")
    script = script.replace("--dir /data", f"--dir {tmp_path} --bind 127.0.0.1 --port {port}")
    environment = {"PATH": os.environ["PATH"], "REDISCLI_AUTH": "0123abcd"}
    server = subprocess.Popen([*container["command"], script], env=environment, stdout=subprocess.DEVNULL)
    try:
        probe = container["readinessProbe"]["exec"]["command"]
        probe = [*probe[:2], probe[2].replace("redis-cli", f"redis-cli -p {port}")]
        until = time.monotonic() + 20
        while subprocess.run(probe, env=environment, capture_output=True).returncode:
            assert time.monotonic() < until, "redis-server does not answer"
            time.sleep(0.1)
        stranger = subprocess.run(probe, env={"PATH": os.environ["PATH"]}, capture_output=True)
        assert stranger.returncode, "it answers without the password"
        assert "0123abcd" not in Path(f"/proc/{server.pid}/cmdline").read_text()
        assert (tmp_path / "appendonlydir").is_dir(), "what it has is not on the volume"
    finally:
        server.terminate()
        assert server.wait(20) == 0, "it does not get the signal to stop"


def instructions():
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    return [line.split() for line in text.splitlines() if line and not line.startswith("#")]


def test_the_image_has_the_ray_that_everything_else_has():
    [base] = [words[1] for words in instructions() if words[0] == "FROM"]
    assert base == yaml.safe_load((ROOT / "cluster.yaml").read_text())["docker"]["image"]
    version = re.fullmatch(r"rayproject/ray:([\d.]+)-py311-gpu", base)[1]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [ray] = [each for each in map(Requirement, project["dependencies"]) if each.name == "ray"]
    assert ray.specifier.contains(version)
    [service] = [each for each in load() if each["kind"] == "RayService"]
    assert service["spec"]["rayClusterConfig"]["rayVersion"] == version


def test_the_image_gets_what_the_package_needs():
    lines = instructions()
    copied = {source for words in lines if words[0] == "COPY" for source in words[2:-1]}
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied == allowed
    assert all((ROOT / source).exists() for source in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"pyproject.toml", "setup.py", project["readme"], *project["license-files"]} <= copied
    assert {"rayllm", "kernels", "benchmarks"} <= copied, "setup.py has packages of these folders"
    assert [words for words in lines if words[0] == "USER"][-1] == ["USER", "1000"]
    assert any(words[:3] == ["RUN", "pip", "install"] for words in lines)


def test_hadolint_has_no_complaints():
    program = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        pytest.skip("hadolint is not installed")
    done = subprocess.run([program, ROOT / "Dockerfile"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
