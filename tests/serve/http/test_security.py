"""Security rules of docs/operations.md that need no engine: keys, limits of the HTTP front, what the code may use."""

import ast
import asyncio
import base64
import ctypes
import gc
import hashlib
import logging
import os
import pickle
import re
import subprocess
import sys
import tracemalloc
from functools import partial
from pathlib import Path

import msgspec
import pytest
from support.app import CHAT, Api, FakeEngine, FakeState, counted, error_of
from support.fakes import FakeWorker
from support.scheduler import make_scheduler

from rayllm.api.sampling_params import SamplingParams
from rayllm.api.types import CompletionOutput, GenerationRequest, RequestOutput
from rayllm.api.wire import FrontMessage
from rayllm.cli import collect_env as cli_env
from rayllm.config.options import BUNDLED_MODEL, EngineConfig, ModelConfig, ServerConfig, make_config
from rayllm.core.check import check_scheduler
from rayllm.core.prefix_cache import PrefixCache
from rayllm.errors import ConfigError
from rayllm.serve.cluster import application as deployment
from rayllm.serve.cluster.application import build_app, make_application, resolve_models
from rayllm.serve.cluster.capacity import Capacity
from rayllm.serve.cluster.launch import key_warnings
from rayllm.serve.http import auth
from rayllm.serve.http.auth import check_key, load_api_keys
from rayllm.serve.http.errors import ApiError
from rayllm.serve.http.metrics import FrontMetrics, RequestTimer
from rayllm.serve.http.request_log import RequestRecord
from rayllm.text.chat_template import ChatTemplate

ROOT = Path(__file__).parents[3]
KEY = "sk-of-the-tests"


# ---- what the code may use


def python_files():
    files = [path for folder in ("rayllm", "kernels") for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 50, "nothing to check"
    return files


@pytest.mark.parametrize("path", python_files(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_nothing_runs_code_out_of_data(path):
    """No pickle and its kin, no eval and exec, no torch.load, unsafe YAML or shells; no socket of ours on a network."""
    for node in ast.walk(ast.parse(path.read_text())):
        where = f"{path.name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            names = {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {(node.module or "").split(".")[0]} | {alias.name for alias in node.names}
        else:
            names = set()
        assert not names & {"pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}, where
        if isinstance(node, ast.Call):
            check_call(node, ast.unparse(node.func), where)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            transports = ("tcp://", "pgm://", "epgm://", "udp://")  # ZeroMQ's beyond the host
            assert not node.value.startswith(transports) or path.name == "socket.py", where  # which demands CURVE keys


def check_call(node, name, where):
    assert name not in ("eval", "exec", "compile", "__import__", "torch.load", "os.system", "os.popen"), where
    assert name not in ("yaml.load", "yaml.load_all", "yaml.full_load", "yaml.unsafe_load"), where
    assert name.rpartition(".")[2] not in ("recv_pyobj", "send_pyobj"), where
    for keyword in node.keywords:
        value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
        if keyword.arg == "trust_remote_code":
            assert value is False, where
        assert not (keyword.arg in ("shell", "allow_pickle") and value is not False), where


def test_only_the_control_group_unpickles():
    """torch.distributed's object lists, between driver and workers, are the one exception."""
    users = {p.relative_to(ROOT).as_posix() for p in python_files() if "object_list(" in p.read_text()}
    assert users
    assert all(user.startswith(("rayllm/executor/", "rayllm/worker/", "rayllm/parallel/")) for user in users)


# ---- API keys


@pytest.fixture
def guarded():
    return Api(keys=load_api_keys(ServerConfig(api_key=KEY), {}))


def test_every_route_but_health_asks_for_a_key(guarded):
    routes = [(method.upper(), path) for path, methods in guarded.app.openapi()["paths"].items() for method in methods]
    assert len(routes) > 10
    routes += [("HEAD", path) for method, path in routes if method == "GET"]
    for method, path in [*routes, ("GET", "/openapi.json"), ("GET", "/nothing"), ("PUT", "/v1/completions")]:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": KEY}, {"x-api-key": KEY}):
            response = guarded.request(method, path.replace("{model_id}", "org/fake"), headers=headers)
            is_anthropic = path.startswith("/v1/messages")
            if path == "/health":
                assert response.status_code == 200
                continue
            if is_anthropic and "x-api-key" in headers:  # where it is a key
                assert response.status_code == 400
                continue
            assert response.status_code == 401, (method, path)
            assert response.headers["www-authenticate"].startswith("Basic" if path == "/" else "Bearer")
            if is_anthropic:
                assert response.json()["error"]["type"] == "authentication_error"
            elif method != "HEAD":
                assert error_of(response, 401)["code"] == "invalid_api_key"
    assert guarded.state.fake.started == []


def test_without_a_key_health_says_only_whether_it_is(guarded):
    guarded.state.reason = "org/fake: /models/secret is gone"
    for headers in ({}, {"authorization": "Bearer wrong"}):
        response = guarded.request("GET", "/health", headers=headers)
        error = error_of(response, 503)
        assert (error["code"], "fake" in response.text, "secret" in response.text) == ("unhealthy", False, False)
        assert response.headers["retry-after"]
    response = guarded.request("GET", "/health", headers={"authorization": f"Bearer {KEY}"})
    assert error_of(response, 503)["message"] == guarded.state.reason
    unguarded = Api(state=guarded.state)
    assert error_of(unguarded.get("/health"), 503)["message"] == guarded.state.reason


def test_the_document_asks_for_keys_where_the_server_does(guarded):
    for app, guards in ((guarded.app, True), (Api().app, False)):
        for path, methods in app.openapi()["paths"].items():
            for operation in methods.values():
                security = operation.get("security")
                assert security == (([{}, {"key": []}] if path == "/health" else [{"key": []}]) if guards else None)


# ---- other origins

PAGE = "https://evil.example"


@pytest.mark.parametrize("content_type", ["text/plain", "application/json", "application/x-www-form-urlencoded"])
def test_pages_of_other_origins_may_not_post(content_type):
    api = Api()
    for headers in (
        {"origin": PAGE},
        {"origin": "null"},
        {"origin": "http://test:81"},
        {"origin": PAGE, "sec-fetch-site": "cross-site"},
        {"origin": "http://other.test", "sec-fetch-site": "same-site"},
        {"sec-fetch-site": "cross-site"},
    ):
        for path, body in (("/v1/completions", b'{"prompt": "x"}'), ("/tokenize", b'{"prompt": "x"}')):
            response = api.post(path, content=body, headers=headers | {"content-type": content_type})
            assert error_of(response, 403)["code"] == "origin_not_allowed", headers
            assert "access-control-allow-origin" not in response.headers
    assert api.state.fake.started == []


def test_own_pages_and_programs_may_post():
    api = Api()
    for headers in (
        {},
        {"origin": "http://test"},
        {"origin": "http://test", "sec-fetch-site": "same-origin"},
        {"origin": "https://name.of.a.proxy", "sec-fetch-site": "same-origin"},
        {"origin": "chrome-extension://abc", "sec-fetch-site": "none"},
    ):
        response = api.post("/v1/completions", content=b'{"prompt": "x"}', headers=headers)
        assert response.status_code == 200, headers
    assert api.request("GET", "/v1/models", headers={"origin": PAGE}).status_code == 200  # the page cannot read it


def test_allowed_origins_may_post_and_read():
    keys = load_api_keys(ServerConfig(api_key=KEY), {})
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    for allowed in ([PAGE], ["https://a.example", PAGE], ["*"]):
        api = Api(ServerConfig(allowed_origins=allowed), keys)
        before = api.request("OPTIONS", "/v1/completions", headers={"origin": PAGE} | asks)
        assert before.status_code == 200
        assert "authorization" in before.headers["access-control-allow-headers"].lower()
        headers = {"origin": PAGE, "sec-fetch-site": "cross-site", "authorization": f"Bearer {KEY}"}
        for stream in (False, True):
            answer = api.request("POST", "/v1/completions", json={"prompt": "x", "stream": stream}, headers=headers)
            assert answer.status_code == 200
            assert answer.headers["access-control-allow-origin"] in (PAGE, "*")
        refused = api.request("POST", "/v1/completions", json={"prompt": "x"}, headers={"origin": PAGE})
        assert error_of(refused, 401) and refused.headers["access-control-allow-origin"] in (PAGE, "*")
        other = api.request("POST", "/v1/completions", json={}, headers=headers | {"origin": "https://b.example"})
        assert other.status_code == (400 if allowed == ["*"] else 403)
    with pytest.raises(ConfigError, match=r"allowed_origins: .*without a path"):
        make_config(ServerConfig, {"allowed_origins": ["https://a.example/page"]})


def test_the_key_opens(guarded):
    for scheme in ("Bearer", "bearer"):
        headers = {"authorization": f"{scheme} {KEY}"}
        assert guarded.request("POST", "/v1/completions", json={"prompt": "x"}, headers=headers).status_code == 200
    assert guarded.request("GET", "/v1/models", headers=headers).status_code == 200


def test_only_the_console_page_takes_a_password(guarded):
    password = base64.b64encode(f"anyone:{KEY}".encode()).decode()
    headers = {"authorization": f"Basic {password}"}
    assert guarded.request("GET", "/", headers=headers).status_code == 200
    for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions"), ("POST", "/"), ("GET", "/metrics")):
        assert guarded.request(method, path, headers=headers).status_code == 401
    for broken in ("Basic", "Basic %%%", "Basic " + base64.b64encode(b"\xff\xff").decode(), "Basic eA=="):
        assert guarded.request("GET", "/", headers={"authorization": broken}).status_code == 401


def test_keys_come_from_file_environment_and_option(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# who may\n\nsk-file-1 alice\n  sk-file-2\n")
    environment = {"RAYLLM_API_KEYS": "sk-env-1, sk-env-2", "RAYLLM_API_KEY": "sk-env-3", "HOME": "/"}
    keys = load_api_keys(ServerConfig(api_key=KEY, api_key_file=str(file)), environment)
    assert environment == {"HOME": "/"}, "children would see the keys"
    names = [key.name for key in keys]
    assert names[4] == "alice"
    assert len(set(names)) == 6
    assert all(re.fullmatch("key-[0-9a-f]{12}", name) for name in names if name != "alice")
    for key in (KEY, "sk-env-1", "sk-env-2", "sk-env-3", "sk-file-1", "sk-file-2"):
        assert check_key(keys, "GET", "/metrics", f"Bearer {key}") in {each.name for each in keys}
    with pytest.raises(ApiError):
        check_key(keys, "GET", "/metrics", "Bearer #")
    assert load_api_keys(ServerConfig(), {}) == []
    for variable in ("RAYLLM_API_KEY", "RAYLLM_API_KEYS"):
        with pytest.raises(ConfigError, match=f"{variable} is set, but has no key in it"):
            load_api_keys(ServerConfig(), {variable: " , "})
    assert check_key([], "GET", "/metrics", None) is None


def test_bad_keys_are_refused_without_being_shown(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# none\n")
    with pytest.raises(ConfigError, match="has no keys in it"):
        load_api_keys(ServerConfig(api_key_file=str(file)), {})
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_api_keys(ServerConfig(api_key_file="/no/such"), {})
    for key in ("", "two words", "schlüssel", "line\nbreak", "s" * 513):
        with pytest.raises(ConfigError) as caught:
            load_api_keys(ServerConfig(api_key=key), {})
        assert key == "" or key not in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        make_config(ServerConfig, {"api_key": 12345})
    assert "12345" not in str(caught.value)
    with pytest.raises(ConfigError, match="1025 API keys; at most 1024"):
        load_api_keys(ServerConfig(), {"RAYLLM_API_KEYS": " ".join(map(str, range(1025)))})


def test_a_key_is_compared_with_all_in_constant_time(monkeypatch):
    compared = []
    real = auth.hmac.compare_digest
    monkeypatch.setattr(auth.hmac, "compare_digest", lambda a, b: compared.append((a, b)) or real(a, b))
    keys = load_api_keys(ServerConfig(), {"RAYLLM_API_KEYS": "a b c"})
    for number, key in ((0, "a"), (2, "c")):
        compared.clear()
        assert check_key(keys, "GET", "/metrics", f"Bearer {key}") == keys[number].name
        assert len(compared) == 3
        assert all(len(a) == len(b) == 32 for a, b in compared)


def test_keys_are_in_no_dump(monkeypatch, capsys):
    server = ServerConfig(api_key=KEY, otlp_endpoint=None)
    for dump in (repr(server), str(server), server.model_dump_json(), str(server.model_dump())):
        assert KEY not in dump
    keys = load_api_keys(server, {})
    assert KEY not in repr(keys)
    bound = []
    real = deployment.FrontOptions
    monkeypatch.setattr(deployment, "FrontOptions", lambda **options: bound.append(real(**options)) or bound[0])
    make_application(resolve_models([ModelConfig(EngineConfig(device="cpu"), server)], Capacity(0)), server, keys=keys)
    monkeypatch.undo()
    assert KEY.encode() not in pickle.dumps(bound[0])  # what Ray keeps
    assert hashlib.sha256(KEY.encode()).digest() in pickle.dumps(bound[0])
    with pytest.raises(ConfigError, match="would be shown by Ray Serve"):
        build_app({"model": BUNDLED_MODEL, "api_key": KEY})
    for variable in auth.KEY_VARIABLES:
        monkeypatch.setenv(variable, KEY)
    cli_env.print_environment()
    assert KEY not in capsys.readouterr().out


def test_whoever_starts_a_server_is_warned():
    assert "--api-key-file" in key_warnings(ServerConfig(api_key="x"), has_keys=True)[0]
    assert "whoever reaches 0.0.0.0" in key_warnings(ServerConfig(host="0.0.0.0"), has_keys=False)[0]
    assert key_warnings(ServerConfig(host="0.0.0.0"), has_keys=True) == []
    assert key_warnings(ServerConfig(), has_keys=False) == []


# ---- limits of the front


async def post(app, chunks, headers=(), more=True, path="/v1/completions"):
    """Post a body of chunks; returns (status, how many chunks were taken)."""
    taken, sent = 0, []

    async def receive():
        nonlocal taken
        taken += 1
        return {"type": "http.request", "body": next(chunks), "more_body": more}

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": b"",
        "query_string": b"",
        "headers": list(headers),
        "asgi": {"spec_version": "2.3"},
    }
    await app(scope, receive, send)
    return sent[0]["status"], taken


def test_a_body_of_100_mb_leaves_memory_flat():
    app = Api().app

    def chunks():
        for _ in range(100):
            yield b"x" * 2**20

    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(3):
            assert asyncio.run(post(app, chunks())) == (413, 2)  # of a server with a small context
        gc.collect()
        now, peak = tracemalloc.get_traced_memory()
        assert now - before < 2**20
        assert peak - before < 40 * 2**20
        tracemalloc.reset_peak()
        declared = [(b"content-length", str(100 * 2**20).encode())]
        assert asyncio.run(post(app, chunks(), declared)) == (413, 0)
        assert tracemalloc.get_traced_memory()[1] - now < 2**20
    finally:
        tracemalloc.stop()


def test_a_refused_body_is_gone_at_once():
    api = Api()
    api.state.fake.info = msgspec.structs.replace(api.state.fake.info, max_model_len=2**20)
    app = api.app
    tracemalloc.start()
    gc.disable()
    try:
        for _ in range(6):
            body = b'{"prompt": 1, "metadata": "' + b"x" * 2**24 + b'"}'
            assert asyncio.run(post(app, iter([body]), more=False))[0] == 400
        # Three copies at once, and perhaps what the thread has of the one before; six bodies would be more.
        assert tracemalloc.get_traced_memory()[1] < 95 * 2**20
    finally:
        gc.enable()
        tracemalloc.stop()


TOKENIZES_LONG_TEXTS = """
import asyncio, re
from pathlib import Path
from test_security import post
from support.app import Api
from rayllm.config.options import BUNDLED_MODEL
from rayllm.serve.http import request
from rayllm.text.tokenizer import load_tokenizer

api = Api()
api.state.fake.tokenizer = load_tokenizer(BUNDLED_MODEL)
text = b"The quick brown fox [and] again. "

def grown_by(copies):
    async def three():
        for _ in range(3):
            body = b'{"prompt": "' + text * copies + b'"}'
            assert (await post(api.app, iter([body]), path="/tokenize", more=False))[0] == 200
        del body
        await asyncio.sleep(2 * request.GIVE_BACK_S)
    before = resident_mib()
    asyncio.run(three())  # which waits for threads
    return resident_mib() - before

def resident_mib():
    return int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024

grown_by(1000)  # all that is loaded at the first use
print(grown_by(30_000))
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="freed memory is only given back by glibc")
def test_long_texts_leave_memory_flat():
    """In a process of its own, as in this one others may have left free memory, which would be used instead."""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    run = partial(subprocess.run, capture_output=True, text=True, timeout=120, env=os.environ | {"PYTHONPATH": path})
    done = run([sys.executable, "-c", TOKENIZES_LONG_TEXTS])
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 30


def test_absurd_numbers_are_refused_at_once():
    api = Api()
    for fields, param in (
        ({"n": 10**9}, "n"),
        ({"n": 10**400}, "n"),
        ({"best_of": 10**9}, "best_of"),
        ({"logprobs": 10**9}, "logprobs"),
        ({"max_tokens": 10**9}, "prompt"),
        ({"prompt": ["x"] * 2000}, "prompt"),
        ({"prompt": ["x"] * 600, "n": 2}, "n"),
    ):
        assert error_of(api.completion(**fields), 400)["param"] == param, fields
    deep = b'{"prompt": ' + b"[" * 10**6
    error_of(api.post("/v1/completions", content=deep), 400)
    assert api.state.fake.started == []


def test_an_endless_chat_template_is_a_400():
    api = Api()
    source = "{% for i in range(10**6) %}{% for j in range(10**6) %}{{ messages }}{% endfor %}{% endfor %}"
    api.state.fake.tokenizer.apply_chat_template = ChatTemplate({"default": source}, {}).render
    for path in ("/v1/chat/completions", "/tokenize"):
        error = error_of(api.post(path, json=CHAT), 400)
        assert error["param"] == "messages"
    assert api.completion().status_code == 200


def test_labels_and_caches_of_the_front_are_bounded():
    """100,000 different models, paths, ids and reasons leave no trace."""
    api = Api()
    logging.disable(logging.CRITICAL)  # pytest would keep each request's log record

    async def ask(count):
        async def send(message):
            pass

        async def receive():
            return {"type": "http.request"}

        for i in range(count):
            scope = {
                "type": "http",
                "method": "GET",
                "path": f"/v1/models/m{i}" if i % 2 else f"/p{i}",
                "raw_path": b"",
                "query_string": b"",
                "headers": [(b"x-request-id", str(i).encode())],
                "asgi": {"spec_version": "2.3"},
            }
            await api.app(scope, receive, send)

    asyncio.run(ask(100))
    size = len(api.get("/metrics").content)
    gc.collect()
    objects = len(gc.get_objects())
    try:
        asyncio.run(ask(100_000))
    finally:
        logging.disable(logging.NOTSET)
    gc.collect()
    assert len(gc.get_objects()) - objects < 10_000  # other tests' threads make some; one a request would be 100,000
    assert len(api.get("/metrics").content) == size


def test_finish_reasons_are_a_fixed_set():
    metrics = FrontMetrics()
    before = metrics.figures().keys()
    for i in range(1000):
        timer = RequestTimer(metrics, RequestRecord("", "GET", "/"), 1)
        timer.saw(RequestOutput("r", None, [1], [CompletionOutput(0, "", [1], finish_reason=f"reason {i}")], True))
    assert counted(metrics, "request_success") == {"other": 1000}
    assert metrics.figures().keys() == before


# ---- the prefix cache


def run(scheduler, worker, request_id, salt, prompt):
    """The number of prompt tokens found in the cache."""
    params = SamplingParams(max_tokens=1)
    scheduler.add(GenerationRequest(request_id=request_id, prompt_token_ids=prompt, params=params, cache_salt=salt))
    cached = []
    while scheduler.has_work():
        cached += [delta.num_cached_tokens for delta in scheduler.update(worker.execute(scheduler.schedule()))]
    return cached[0]


def test_salts_do_not_share_blocks():
    options = {"max_num_seqs": 2, "max_num_batched_tokens": 64, "max_model_len": 64}
    scheduler, worker = make_scheduler(num_blocks=64, block_size=4, **options), FakeWorker(64, 4, 2)
    prompt = list(range(3, 23))
    assert run(scheduler, worker, "a", "tenant-1", prompt) == 0
    for i, salt in enumerate(("tenant-2", "", "tenant-", "tenant-1 ", "TENANT-1")):
        assert run(scheduler, worker, f"b{i}", salt, prompt) == 0
    assert run(scheduler, worker, "c", "tenant-1", prompt) == 16


def test_many_salts_are_bounded_by_the_pool():
    options = {"max_num_seqs": 2, "max_num_batched_tokens": 64, "max_model_len": 64}
    scheduler, worker = make_scheduler(num_blocks=16, block_size=4, **options), FakeWorker(16, 4, 2)
    for i in range(2000):
        assert run(scheduler, worker, str(i), f"salt {i}", [3, 4, 5, 6, 7]) == 0
        assert len(scheduler.state.memory.gpu.cache) <= 16
    check_scheduler(scheduler)


def test_hashes_differ_between_processes():
    def chain(cache):
        hashes = []
        cache.extend(hashes, cache.root("salt"), [1, 2, 3, 4], 1)
        return hashes

    assert chain(PrefixCache(4)) != chain(PrefixCache(4))
    assert chain(PrefixCache(4, b"same")) == chain(PrefixCache(4, b"same"))
    assert all(len(each) == hashlib.sha256().digest_size for each in chain(PrefixCache(4)))


def test_the_wire_to_the_engine_knows_its_messages_only():
    """The wire to the engine is made of typed structs: a field more or of another type is refused."""
    decode = msgspec.msgpack.Decoder(FrontMessage).decode
    for message in ({"type": "Exec", "code": "1"}, {"type": "Aborts", "aborts": [1]}, ["x"], pickle.dumps({})):
        with pytest.raises(msgspec.ValidationError):
            decode(msgspec.msgpack.encode(message))


def test_a_request_says_who_sends_it():
    """What is shared by client is shared by key, or by address where nobody has a key."""

    class Recording(FakeEngine):
        async def generate(self, request, prompt_text=None):
            clients.append(request.client)
            async for output in super().generate(request, prompt_text):
                yield output

    clients = []
    known = load_api_keys(ServerConfig(api_key=KEY), {})
    for keys in ([], known):
        state = FakeState()
        state.fake = Recording()
        headers = {"authorization": f"Bearer {KEY}"}
        for path, body in (("/v1/completions", {"prompt": "hi"}), ("/v1/chat/completions", CHAT)):
            assert Api(keys=keys, state=state).post(path, json=body, headers=headers).status_code == 200
    assert clients == ["127.0.0.1", "127.0.0.1", known[0].name, known[0].name]
