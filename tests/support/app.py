"""A fake engine with its tokenizer and server state, and the app over them with blocking calls."""

import asyncio
import tempfile
from array import array
from pathlib import Path

import httpx

from rayllm.api.types import CompletionOutput, EngineInfo, EngineStats, Logprob, RequestOutput, RequestTimes
from rayllm.config.options import ServerConfig
from rayllm.errors import EngineDeadError, InvalidRequestError
from rayllm.serve.http.app import create_app
from rayllm.serve.http.jobs import Jobs
from rayllm.serve.http.limits import Admission
from rayllm.serve.http.metrics import FrontMetrics, ModelFigures, render
from rayllm.serve.http.responses.store import ResponseStore

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


class CharTokenizer:
    """A token is a character."""

    special_ids = frozenset()
    special_texts = frozenset()
    special_tokens = {"eos_token": "\0"}
    infill_marks = None

    def encode(self, text, add_special_tokens=True):
        return [ord(c) for c in text]

    def decode(self, token_ids, skip_special_tokens=True):
        return "".join(map(chr, token_ids))

    def special_id(self, text):
        return None

    def token_text(self, token_id):
        return chr(token_id)

    def token_bytes(self, token_id):
        return chr(token_id).encode()

    def chat_template_source(self, with_tools=False):
        return ""

    def chat_template_variables(self, with_tools=False):
        return frozenset()

    def apply_chat_template(self, messages, add_generation_prompt=True, **options):
        return "".join(m["content"] for m in messages)


class FakeEngine:
    """Continues every prompt with the alphabet. A prompt "dead", "bad" or "poison" fails, "slow" never ends."""

    info = EngineInfo(model="m", max_model_len=64, vocab_size=1000, num_kv_tokens=640, eos_token_ids=[0], hidden_size=3)

    def __init__(self):
        self.tokenizer = CharTokenizer()
        self.started = []
        self.aborted = []
        self.forgotten = []
        self.adapters = []  # that requests asked for

    def forget(self, key_id):
        self.forgotten.append(key_id)

    async def generate(self, request, prompt_text=None):
        self.started.append(request.request_id)
        self.adapters.append(request.adapter)
        prompt = self.tokenizer.decode(request.prompt_token_ids)
        count = request.params.max_tokens or 3
        try:
            if prompt == "dead":
                raise EngineDeadError("a worker was lost")
            if prompt == "bad":
                raise ValueError("secret detail")
            if prompt == "poison":
                part = CompletionOutput(0, "", [], finish_reason="error", stop_reason="no such kernel")
                yield RequestOutput(request.request_id, prompt_text, request.prompt_token_ids, [part], True)
                return
            if request.pooling is not None:
                yield self._embedding(request, prompt_text)
                return
            for step in range(10**9 if prompt == "slow" else count):
                await asyncio.sleep(0.01 if prompt == "slow" else 0)
                if prompt == "dying" and step == 1:
                    raise EngineDeadError("a worker was lost")
                yield self._output(request, prompt_text, step, count)
        finally:
            self.aborted.append(request.request_id)

    def _embedding(self, request, prompt_text):
        """(0.6, 0.8 or -0.8 for a mean, the prompt's length / 64)."""
        values = [0.6, 0.8 if request.pooling == "last" else -0.8, len(request.prompt_token_ids) / 64]
        part = CompletionOutput(0, "", [], finish_reason="stop")
        ids = request.prompt_token_ids
        return RequestOutput(request.request_id, prompt_text, ids, [part], True, embedding=array("f", values))

    def _output(self, request, prompt_text, step, count):
        token = 97 + step % 26
        last = step == count - 1
        entries = [{token: Logprob(-0.25, 1)}] if request.params.logprobs is not None else None
        parts = [
            CompletionOutput(i, chr(token), [token], logprobs=entries, finish_reason="length" if last else None)
            for i in range(request.params.n)
        ]
        return RequestOutput(request.request_id, prompt_text, request.prompt_token_ids, parts, last)

    async def stats(self):
        return EngineStats(num_running=2, num_used_blocks=1, num_total_blocks=4, prompt_tokens=11)


class FakeState:
    """A model with one engine, and all of a server that has no other."""

    def __init__(self, server=None, name="org/fake"):
        self.name = name
        self.server = server or ServerConfig()
        self.metrics = FrontMetrics()
        self.peers = []  # snapshots of other servers'
        self.admission = Admission(self.server, max_running=4)
        self.fake = FakeEngine()
        self.reason = None
        self.dead = False
        self.models = {name: self}
        self.adapters = {}
        self.jobs = Jobs()
        self._folder = tempfile.TemporaryDirectory(prefix="rayllm-test-")
        self.response_store = ResponseStore(Path(self._folder.name))

    @property
    def door(self):
        return self.admission

    async def describe_cluster(self):
        return ["hosts", "  10.0.0.1"]

    async def cluster_json(self):
        return b'{"hosts":[],"applications":[]}'

    @property
    def num_replicas(self):
        return 0 if self.dead else 1

    def engine(self):
        if self.dead:
            raise EngineDeadError("it is being restarted")
        return self.fake

    async def load_adapter(self, name, path):
        if path == "/bad":
            raise InvalidRequestError("an engine cannot load it", "lora_path")
        self.adapters[name] = path

    async def unload_adapter(self, name):
        if self.adapters.pop(name, None) is None:
            raise InvalidRequestError(f"no adapter {name!r} is loaded", "lora_name")

    async def unhealthy_reason(self):
        return self.reason

    def peer_metrics(self):
        return self.peers

    async def stats(self):
        return {} if self.dead else {"0": await self.fake.stats()}


class Api:
    """The app with blocking calls."""

    def __init__(self, server=None, keys=(), state=None, **options):
        self.state = state or FakeState(server)
        self.app = create_app(self.state, server, keys, **options)

    def request(self, method, path, **kwargs):
        async def call():
            transport = httpx.ASGITransport(app=self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, path, **kwargs)

        return asyncio.run(call())

    def get(self, path):
        return self.request("GET", path)

    def post(self, path, **kwargs):
        return self.request("POST", path, **kwargs)

    def completion(self, **fields):
        return self.post("/v1/completions", json={"prompt": "hi"} | fields)

    def chat(self, **fields):
        return self.post("/v1/chat/completions", json=CHAT | fields)


def counted(metrics, name):
    """Label value -> count, of a counter of FrontMetrics with one label; those without a count are left out."""
    return {label: value for label, value in figures(metrics, f"{name}_total").items() if value}


def figures(metrics, name):
    """The samples of this name: the value of their one label, or None without any -> the sample's value."""
    found = {}
    for family in metrics.registry.collect():
        for sample in family.samples:
            if sample.name == f"rayllm:{name}":
                found[next(iter(sample.labels.values()), None)] = sample.value
    assert found, name
    return found


def error_of(response, status):
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]


class StagedEngine(FakeEngine):
    """Prompts are stages: "stuck" never starts; "s..." starts; "st..." has one token too; then it hangs.

    "search" is over its prompt, and has its tokens when all other deadlines are over.
    """

    async def generate(self, request, prompt_text=None):
        self.started.append(request.request_id)
        prompt = self.tokenizer.decode(request.prompt_token_ids)
        ids = request.prompt_token_ids
        try:
            if prompt.startswith("s") and request.report_start:
                yield RequestOutput(request.request_id, prompt_text, ids, [CompletionOutput(0, "", [])], False)
            if prompt.startswith("st"):
                part = CompletionOutput(0, "a", [97])
                yield RequestOutput(request.request_id, prompt_text, ids, [part], False, times=RequestTimes(0.25, 0.5))
            if prompt == "search":
                yield RequestOutput(request.request_id, prompt_text, ids, [], False, times=RequestTimes(0.25, 0.5))
                await asyncio.sleep(0.15)
            await asyncio.sleep(0 if prompt in ("go", "search") else 60)
            part = CompletionOutput(0, "b", [98], finish_reason="stop")
            yield RequestOutput(request.request_id, prompt_text, ids, [part], True)
        finally:
            self.aborted.append(request.request_id)


def staged(**limits):
    api = Api(ServerConfig(**limits))
    api.state.fake = StagedEngine()
    return api


def render_metrics(model_name, stats, front):
    """The Prometheus text of one model with one engine."""
    return render([ModelFigures(model_name, {"0": stats}, front, [], 1)])
