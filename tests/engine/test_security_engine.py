"""The security rules that need the bundled model: poison beside a canary, model folders that want to run code."""

import asyncio
import contextlib
import json
import re
import shutil

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.app import Api, FakeState
from support.driver import until

from rayllm.api.sampling_params import SamplingParams
from rayllm.config.options import BUNDLED_MODEL, EngineConfig, ServerConfig
from rayllm.config.resolved import resolve
from rayllm.engine.async_engine import AsyncEngine
from rayllm.engine.engine import EngineCore
from rayllm.errors import ModelError
from rayllm.executor.local import LocalExecutor
from rayllm.llm import LLM
from rayllm.text.grammar_compiler import GrammarCompiler
from rayllm.text.tokenizer import load_tokenizer

CONFIG = EngineConfig(device="cpu", max_model_len=256, num_gpu_blocks_override=64, max_num_seqs=8)
CANARY = {"prompt": "The for statement", "max_tokens": 200, "temperature": 0, "ignore_eos": True, "stream": True}

DEEP_SCHEMA = json.loads('{"type": "object", "properties": {"a": ' * 200 + "{}" + "}}" * 200)
DEEP_VALUE = json.loads("[" * 900 + "]" * 900)
POISON = [
    {"prompt": [4096]},
    {"prompt": [-1]},
    {"prompt": [2**63]},
    {"prompt": [1.5]},
    {"prompt": []},
    {"prompt": "x " * 5000},
    {"prompt": "\ud83d"},
    {"prompt": "\x00\x01\u202e" * 50},
    {"prompt": "<|im_end|>" * 100},
    {"prompt": "x", "max_tokens": 0},
    {"prompt": "x", "n": 10**9},
    {"prompt": "x", "temperature": float("nan")},
    {"prompt": "x", "temperature": 1e308},
    {"prompt": "x", "temperature": 1e-308},
    {"prompt": "x", "top_p": 1e-300},
    {"prompt": "x", "top_k": 2**62},
    {"prompt": "x", "min_p": 1.0, "temperature": 2.0},
    {"prompt": "x", "repetition_penalty": 1e30},
    {"prompt": "x", "presence_penalty": float("inf")},
    {"prompt": "x", "logit_bias": {"99999": 1}},
    {"prompt": "x", "logit_bias": {str(i): -100 for i in range(4096)}},
    {"prompt": "x", "logit_bias": {"1": float("-inf")}},
    {"prompt": "x", "stop": [""]},
    {"prompt": "x", "stop": ["a" * 100_000]},
    {"prompt": "x", "stop_token_ids": [10**12]},
    {"prompt": "x", "seed": 2**64},
    {"prompt": "x", "logprobs": 20, "prompt_logprobs": 20},
    {"prompt": "x", "cache_salt": "s" * 257},
    {"prompt": "x", "priority": 2**40},
    {"prompt": DEEP_VALUE},
    {"prompt": "x", "metadata": DEEP_VALUE},
    {"prompt": "x", "structured_outputs": {"regex": "(a+)+b"}},
    {"prompt": "x", "structured_outputs": {"regex": "((((((a{1,200}){1,200}){1,200}){1,200}){1,200}){1,200})"}},
    {"prompt": "x", "structured_outputs": {"json": DEEP_SCHEMA}},
    {"prompt": "x", "structured_outputs": {"grammar": "root ::= root root | root"}},
    {"messages": [{"role": "user", "content": "{{ ''.__class__ }}"}]},
    {"messages": [{"role": "user", "content": DEEP_VALUE}]},
    {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": {"name": "x" * 999}}]},
]


class RecordingCore(EngineCore):
    """Keeps the ids of the requests that came and of those that were aborted."""

    def __init__(self, *args):
        super().__init__(*args)
        self.added, self.aborted = [], []

    def add(self, request):
        super().add(request)
        self.added.append(request.request_id)

    def abort(self, aborts):
        super().abort(aborts)
        self.aborted += [abort.request_id for abort in aborts]


class EngineState(FakeState):
    """Of a server whose engine is a real one."""

    def __init__(self, engine, server=None):
        super().__init__(server)
        self.fake = engine

    async def stats(self):
        return {"0": self.fake.stats()}


def client_of(engine, server=None):
    """A client of an app in front of the engine."""
    api = Api(server, state=EngineState(engine, server))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=api.app), base_url="http://test", timeout=60)


@contextlib.asynccontextmanager
async def real_engine():
    """An engine with the bundled model, a client of an app in front of it, and its core."""
    config = resolve(CONFIG, 0)
    executor = LocalExecutor(config)
    grammars = GrammarCompiler(config.options.model, config.spec.vocab_size, config.spec.eos_token_ids)
    core = RecordingCore(config, executor, executor.start(), grammars)
    engine = AsyncEngine(core, load_tokenizer(config.options.model))
    await engine.start()
    try:
        async with client_of(engine) as client:
            yield client, engine, core
    finally:
        await engine.close()


async def send(client, body):
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    content = json.dumps({"max_tokens": 4} | body)  # NaN and Infinity too, which JSON does not have
    return await client.post(path, content=content.encode())


def test_poison_fails_alone():
    async def scenario():
        async with real_engine() as (client, engine, _core):
            expected = (await client.post("/v1/completions", json=CANARY)).text
            canaries = [asyncio.create_task(client.post("/v1/completions", json=CANARY)) for _ in range(2)]
            answers = await asyncio.gather(*(send(client, body) for body in POISON))
            for body, answer in zip(POISON, answers, strict=True):
                assert answer.status_code in (200, 400), (str(body)[:200], answer.text)
                if answer.status_code == 400:
                    assert answer.json()["error"]["message"]
            assert sum(answer.status_code == 400 for answer in answers) > len(POISON) / 2
            for canary in canaries:
                assert texts(await canary) == texts(expected)
            while (stats := engine.stats()).num_running or stats.num_waiting:
                await asyncio.sleep(0.05)
            assert stats.num_used_blocks == 0

    def texts(stream):
        frames = (stream if isinstance(stream, str) else stream.text).split("\n\n")[:-2]
        return "".join(json.loads(frame[6:])["choices"][0]["text"] for frame in frames)

    asyncio.run(scenario())


def test_a_missed_deadline_ends_the_work_in_the_engine():
    """24 completions hold the 8 rows; one more, which may not wait, is never started and leaves the queue."""

    async def scenario():
        async with real_engine() as (client, engine, core), asyncio.timeout(60):
            body = CANARY | {"stream": False, "temperature": 1}
            runs = [asyncio.create_task(client.post("/v1/completions", json=body | {"n": 4})) for _ in range(6)]
            await until(lambda: len(core.added) == 6)
            async with client_of(engine, ServerConfig(queue_timeout=0.2, request_timeout=30)) as hasty:
                late = await hasty.post("/v1/completions", json=body)
            assert (late.status_code, late.json()["error"]["code"]) == (408, "queue_timeout")
            await until(lambda: core.aborted == core.added[6:])
            assert not any(run.done() for run in runs[4:]), "the queue was empty before the deadline"
            for run in runs:
                run.cancel()
            while (stats := engine.stats()).num_running or stats.num_waiting:
                await asyncio.sleep(0.01)
            assert stats.num_used_blocks == 0
            assert (await client.post("/v1/completions", json=body | {"max_tokens": 1})).status_code == 200
            figures = (await client.get("/metrics")).text
            assert re.search(r"^rayllm:request_prefill_time_seconds_count{.*} [1-9]", figures, re.MULTILINE)

    asyncio.run(scenario())


@pytest.fixture(scope="module")
def loop():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def client(loop):
    context = real_engine()
    client, *_ = loop.run(context.__aenter__())
    yield client
    loop.run(context.__aexit__(None, None, None))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FIELDS = [
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_tokens",
    "stop",
    "seed",
    "logprobs",
    "logit_bias",
    "echo",
    "min_tokens",
    "stop_token_ids",
    "repetition_penalty",
    "prompt_logprobs",
    "cache_salt",
    "priority",
    "stream",
]


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(fields=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4))
def test_no_field_has_a_value_that_breaks_anything(loop, client, fields):
    answer = loop.run(send(client, {"prompt": "hi"} | fields))
    assert answer.status_code in (200, 400), (fields, answer.text)
    assert b"internal" not in answer.content
    assert loop.run(send(client, {"prompt": "hi"})).status_code == 200


# ---- model folders


@pytest.fixture
def folder(tmp_path):
    copy = tmp_path / "model"
    shutil.copytree(BUNDLED_MODEL, copy)
    return copy


def test_auto_map_runs_nothing(folder, tmp_path):
    """A checkpoint that brings code is served by our code, or not at all; its own is never imported."""
    canary = tmp_path / "it-ran"
    source = f"open({str(canary)!r}, 'w').close()\nclass Evil: pass\n"
    for name in ("modeling_evil.py", "configuration_evil.py", "tokenization_evil.py"):
        (folder / name).write_text(source)
    auto_map = {
        "AutoConfig": "configuration_evil.Evil",
        "AutoModelForCausalLM": "modeling_evil.Evil",
        "AutoTokenizer": ["tokenization_evil.Evil", None],
    }
    for name in ("config.json", "tokenizer_config.json"):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | {"auto_map": auto_map, "trust_remote_code": True}))
    with LLM(str(folder), device="cpu", max_model_len=64, num_gpu_blocks_override=16) as llm:
        assert llm.generate(["The"], SamplingParams(max_tokens=2))[0].outputs[0].token_ids
    (folder / "tokenizer.json").unlink()  # now only transformers could make a tokenizer of it
    with contextlib.suppress(ModelError), LLM(str(folder), device="cpu", num_gpu_blocks_override=16, max_model_len=64):
        pass
    assert not canary.exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_pickled_weights_are_refused(folder, tmp_path, name):
    (folder / "model.safetensors").unlink()
    canary = tmp_path / "it-ran"
    (folder / name).write_bytes(b"cbuiltins\nopen\n(V" + str(canary).encode() + b"\nVw\ntR.")
    with pytest.raises(ModelError, match="safetensors"):
        LLM(str(folder), device="cpu", num_gpu_blocks_override=16, max_model_len=64)
    assert not canary.exists()
