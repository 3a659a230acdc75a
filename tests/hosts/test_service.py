"""A service on hosts that Ray's autoscaler makes: growth, an update under load, hosts that are taken away, ranks on two
hosts, an ingress that dies. Streams go on through all of it.

The tests follow one another on one cluster. A worker has two places: for an API server, a replica, or a rank.
"""

from __future__ import annotations

import json
import re
import statistics
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file
from support.ray_hosts import GrowingCluster, Resumed, Streams, Texts, wait_for

from rayllm.config.options import BUNDLED_MODEL

pytestmark = pytest.mark.timeout(600)  # for machines without a free core

OPTIONS = {
    "device": "cpu",
    "num_gpu_blocks_override": 2000,
    "host": "0.0.0.0",
    "deterministic": True,
    "num_api_servers": 2,
    "max_num_seqs": 6,
    "replica_drain_timeout": 1,
    "spot_notices": "cloud_of_test:notice",
    "enable_lora": True,
}
ELASTIC = {"max_replicas": 3, "target_queued_tokens": 40, "upscale_delay": 1, "downscale_delay": 5}
CLOUD = """
import json, pathlib, time
import ray

def notice():
    at = json.loads(pathlib.Path(__file__).with_name("notices").read_text()).get(ray.util.get_node_ip_address())
    return None if at is None else at - time.time()
"""


@pytest.fixture(scope="module")
def cluster(hosts, laptop, supervisor):
    (hosts.modules / "cloud_of_test.py").write_text(CLOUD)
    (hosts.modules / "notices").write_text("{}")
    cluster = GrowingCluster(hosts, laptop, supervisor)
    cluster.configure(**OPTIONS, **ELASTIC)
    cluster.launch()
    return cluster


@pytest.fixture(scope="module")
def texts():
    return Texts()


def urls(cluster, *without):
    """Of the ingress on the head, and on all hosts with API servers but these."""
    return [cluster.url(name) for name in ["n1", *sorted({name for name, _ in cluster.status().servers} - {*without})]]


def post(laptop, url, body):
    """The answer."""
    curl = "curl --silent --fail --max-time 20 --header 'content-type: application/json'"
    return json.loads(laptop.run(f"{curl} --data '{json.dumps(body)}' {url}"))


def ask(laptop, url, model="tiny-pydoc"):
    """Tokens of an answer, the likeliest ones, as text."""
    body = {"model": model, "prompt": "The for statement", "max_tokens": 24, "temperature": 0}
    return post(laptop, f"{url}/v1/completions", body)["choices"][0]["text"]


def update(cluster, **options):
    """Have the launch take other options; returns what it says in the end."""
    before = len(cluster.said())
    cluster.configure(**OPTIONS | options)
    cluster.update()
    ends = r"rayllm: (updated|the update failed.*|the options stay.*)"
    wait_for(lambda: re.search(ends, cluster.said()[before:]), cluster.head.path("launch.log"))
    return re.search(ends, cluster.said()[before:])[1]


def test_hosts_come_for_queued_tokens_and_go(cluster, laptop, supervisor, texts, phases):
    assert len(cluster.status().engines) == 1
    first, where = cluster.workers, urls(cluster)
    # Repeated, or the queue might be empty before a host for the third is there.
    load = Streams(laptop, wait=False, urls=where, count=30, max_tokens=100, interval=0.1, silence=120, repeat=True)
    phases.add(
        "from 1 to 3 replicas, a host included",
        wait_for(lambda: len(cluster.status().engines) == 3, supervisor.history),
    )
    assert len(cluster.workers) == 3
    texts.check(load.results(), 100)
    start = time.monotonic()
    few = Streams(laptop, wait=False, urls=where, count=5, max_tokens=250, interval=2.0, repeat=True)
    wait_for(lambda: len(cluster.status().engines) == 1, supervisor.history)
    phases.add("back to 1 replica, 10 s of calm included", time.monotonic() - start)
    phases.add("back to 1 replica: longest pause of a stream", texts.check(few.results(), 250))
    wait_for(lambda: cluster.workers == first, supervisor.history)
    phases.add("and to two workers, 9 s of idleness included", time.monotonic() - start)
    assert [what for _, what, _ in supervisor.history][-2:] == ["create", "terminate"]


def test_what_a_host_between_costs(cluster, hosts, laptop, phases):
    """Figures, for benchmarks/RESULTS.md: clients beside the API server on the engine's host, and beside the other."""
    status = cluster.status()
    (engine,) = {name for name, _ in status.engines}
    assert len({name for name, _ in status.servers}) == 2
    for name, address in status.servers:
        way, url = "ipc" if name == engine else "tcp, CURVE", f"http://{address}"
        single = Streams(hosts[name], wait=False, urls=[url], count=30, max_tokens=2, interval=0.1).results()
        phases.add(f"first token, {way}", statistics.median(each.first - each.asked for each in single))
        many = Streams(hosts[name], wait=False, urls=[url], count=6, max_tokens=200).results()
        seconds = max(each.last for each in many) - min(each.asked for each in many)
        phases.add(f"1,000 tokens of 6 streams, {way}", seconds / 1.2)


def test_an_update_loses_no_stream(cluster, hosts, laptop, texts, phases):
    """Streams are longer than replicas have to drain. The new replicas' hosts copy the checkpoint from the head."""
    folder = cluster.head.run(
        "mkdir ~/models; cp -r ~/rayllm/rayllm/assets/tiny-pydoc ~/models; echo ~/models/*"
    ).strip()
    where = urls(cluster)
    # Several on each engine at any time: those on the old ones must not all be near their ends when these are drained.
    # The last ones wait for others' ends, 44 s on two slow cores.
    running = Streams(laptop, urls=where, count=8, max_tokens=400, interval=1.0, silence=120, repeat=True, wait=False)
    with Resumed(laptop, where[0]) as resumed:
        with phases.timed("update under load, a host for it included"):
            assert update(cluster, num_replicas=2, max_model_len=2000, model=folder) == "updated"
        for name, _ in cluster.status().engines:
            assert hosts[name].run(f"ls {folder}/.copied-by-rayllm")
        pause = texts.check(running.results(), 400)
        phases.add("update: longest pause of a stream", pause)
        assert pause < 20, "a stream that has begun does not wait for a turn"
    assert resumed.count, "no stream had to move"
    for url in urls(cluster):  # a host of the old replicas may have gone, as nothing is left on it
        models = json.loads(laptop.run(f"curl --silent --fail {url}/v1/models"))["data"]
        assert [each["max_model_len"] for each in models] == [2000]


def test_an_update_that_does_not_come_up(cluster, laptop, texts, phases):
    wait_for(lambda: len(cluster.status().engines) == 2, "the update leaves old replicas")
    before, where = cluster.status().engines, urls(cluster)
    running = Streams(laptop, urls=where, count=5, max_tokens=250, repeat=True)
    with phases.timed("an update that fails"):
        said = update(cluster, num_replicas=2, max_model_len=2000, num_gpu_blocks_override=20)
    assert said == "the update failed; the replicas that there were go on"
    texts.check(running.results(), 250)
    assert cluster.status().engines == before
    assert [ask(laptop, url) for url in where]


def write_adapter(folder):
    """One of the bundled model's, with much effect."""
    rng, tensors = np.random.default_rng(0), {}
    with safe_open(Path(BUNDLED_MODEL, "model.safetensors"), "numpy") as weights:
        for name in weights.keys():  # noqa: SIM118, it is no mapping
            if name.endswith("o_proj.weight"):
                outputs, inputs = weights.get_slice(name).get_shape()
                module = f"base_model.model.{name.removesuffix('.weight')}"
                tensors[f"{module}.lora_A.weight"] = rng.normal(size=(8, inputs)).astype(np.float32)
                tensors[f"{module}.lora_B.weight"] = rng.normal(size=(outputs, 8)).astype(np.float32)
    folder.mkdir()
    told = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["o_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(told))
    save_file(tensors, folder / "adapter_model.safetensors")


def test_an_adapter_comes_to_all_hosts(cluster, hosts, laptop, phases):
    """Its folder is on the head, where neither an engine nor an API server is."""
    write_adapter(cluster.head.path("sql"))
    folder, where = cluster.head.run("echo ~/sql").strip(), urls(cluster)
    with phases.timed("an adapter is loaded on hosts that lack it"):
        post(laptop, f"{where[0]}/v1/load_lora_adapter", {"lora_name": "sql", "lora_path": folder})
    for name, _ in cluster.status().engines:
        assert hosts[name].run(f"ls {folder}/.copied-by-rayllm")
    plain, adapted = ({ask(laptop, url, model) for url in where * 2} for model in ("tiny-pydoc", "sql"))
    assert len(plain) == len(adapted) == 1 and plain != adapted
    post(laptop, f"{where[0]}/v1/unload_lora_adapter", {"lora_name": "sql"})


def test_an_ingress_dies(cluster, hosts, laptop, texts, phases):
    """Only the connections through it are lost; others are served elsewhere meanwhile, and it comes back."""
    *others, gone = urls(cluster)
    host = hosts[cluster.status().servers[-1][0]]
    its_own = Streams(laptop, urls=[gone], count=2, max_tokens=250)
    running = Streams(laptop, urls=others, count=4, max_tokens=250)
    host.run("kill -KILL $(pgrep -f ^ray::HostIngress)")
    assert [ask(laptop, url) for url in others]
    listens = f"curl --silent --fail --output /dev/null --max-time 5 {gone}/health && echo yes"
    back = wait_for(lambda: laptop.run(listens, check=False) == "yes\n", "the ingress does not come back")
    phases.add("an ingress that dies is back", back)
    assert all(each.error for each in its_own.results())
    texts.check(running.results(), 250)


def drained(cluster, hosts, laptop, texts, phases, what, take):
    """Have a host with an engine, and an API server if possible, taken away by take(host), under streams."""
    status = cluster.status()
    _, _, recoveries = status.text.partition("last recoveries")
    with_server = [name for name, _ in status.servers]
    victim = max((name for name, _ in status.engines), key=with_server.count)
    where = urls(cluster, victim)
    running = Streams(laptop, urls=where, count=6, max_tokens=400, interval=0.5, repeat=True)
    with Resumed(laptop, where[0]) as resumed:
        start = time.monotonic()
        take(hosts[victim])
        drains = rf"^  {hosts[victim].ip}  .* drains, goes in \d+ s$"
        wait_for(lambda: re.search(drains, cluster.status().text, re.MULTILINE), "nobody drains")
        wait_for(lambda: victim not in {name for names in cluster.status()[1:] for name, _ in names}, "nobody leaves")
        phases.add(f"{what}: all have left the host", time.monotonic() - start)
        phases.add(f"{what}: longest pause of a stream", texts.check(running.results(), 400))
    assert resumed.count, "no stream had to move"
    # At once if their host was there before the other one's time was over.
    wait_for(lambda: [len(each) for each in cluster.status()[1:]] == [2, 2], "no others come")
    assert cluster.status().text.partition("last recoveries")[2] == recoveries, "nobody died"
    assert [ask(laptop, url) for url in urls(cluster)]


def test_a_host_is_drained(cluster, hosts, laptop, texts, phases):
    def drain(host):
        nodes = json.loads(cluster.head.run("rayllm status --json 2> /dev/null"))["hosts"]
        (node_id,) = [each["node_id"] for each in nodes if each["address"] == host.ip and each["alive"]]
        reason = "--reason DRAIN_NODE_REASON_PREEMPTION --reason-message 'a test' --deadline-remaining-seconds 60"
        cluster.head.run(f"ray drain-node --node-id {node_id} {reason}")

    drained(cluster, hosts, laptop, texts, phases, "drain", drain)


def test_the_cloud_takes_a_host_away(cluster, hosts, laptop, texts, phases):
    def notice(host):
        (hosts.modules / "notices").write_text(json.dumps({host.ip: time.time() + 60}))

    drained(cluster, hosts, laptop, texts, phases, "spot notice", notice)


def test_ranks_on_two_hosts(cluster, hosts, laptop, phases):
    """A replica of two ranks where no host has room for both; one of its hosts dies silently."""
    text = ask(laptop, cluster.url("n1"))
    with phases.timed("update to ranks on two hosts, hosts for them included"):
        assert update(cluster, tensor_parallel_size=2) == "updated"
    wait_for(lambda: len(cluster.status().engines) == 1, "the update leaves old replicas")
    other = rank_host(cluster, hosts)
    # Not the head's: its ingress passes requests to API servers of any host, also to one on the host that is to die.
    _, *where = urls(cluster, other)
    assert [ask(laptop, url) for url in where] == [text] * len(where)

    texts = Texts()
    options = {"urls": where, "count": 6, "max_tokens": 120, "silence": 90}
    texts.check(Streams(laptop, **options).results(), 120)
    running = Streams(laptop, **options)
    stopped = rank_process(cluster, hosts[other].ip)
    hosts[other].run(f"kill -STOP {stopped}")
    phases.add("a rank on another host is stopped: longest pause of a stream", texts.check(running.results(), 120))
    assert rank_process(cluster, hosts[other].ip) != stopped
    assert "gone" in hosts[other].run(f"test -e /proc/{stopped} || echo gone", check=False)

    running, gone = Streams(laptop, **options), hosts[other].ip
    hosts[other].cut_network()
    phases.add("the host of a rank dies silently: longest pause of a stream", texts.check(running.results(), 120))
    # A recovery is over before what the engine reports of its ranks has come round.
    wait_for(lambda: len(on := rank_addresses(cluster)) == 2 and gone not in on, "no host has taken the rank over")


def rank_process(cluster, ip):
    """The process of the one rank on a host."""
    (process,) = re.findall(rf"^    rank \d+  node {re.escape(ip)}, process (\d+)", cluster.status().text, re.MULTILINE)
    return int(process)


def rank_addresses(cluster):
    """The hosts of the ranks, by rank."""
    return re.findall(r"^    rank \d+  node (\S+),", cluster.status().text, re.MULTILINE)


def rank_host(cluster, hosts):
    """Of a replica with ranks on two hosts, the one where its driver is not."""
    ((driver, _),) = cluster.status().engines
    (other,) = set(rank_addresses(cluster)) - {hosts[driver].ip}
    return next(name for name in hosts.names() if hosts[name].ip == other)
