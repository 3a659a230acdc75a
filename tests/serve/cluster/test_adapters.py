"""Adapters of a deployment: on all engines or on none, later ones included, and known to all API servers."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import defaultdict

import pytest
import torch
from support.adapters import greedy, make_adapter, merged
from support.driver import FakeCore, until
from support.model_factory import make_model
from support.serve import KEYS, LocalDirectory, place

from rayllm import SamplingParams
from rayllm.api.types import GenerationRequest
from rayllm.api.wire import Endpoint
from rayllm.config.options import EngineConfig
from rayllm.config.resolved import resolve
from rayllm.errors import EngineDeadError, InvalidRequestError, ModelError
from rayllm.serve.cluster.adapters import FrontAdapters, ReplicaAdapters
from rayllm.serve.cluster.directory import EngineMember, LaunchMember, LoraRecord, ServerMember, adapters_known
from rayllm.serve.cluster.front import FrontModel, ModelFront
from rayllm.serve.cluster.replica import EngineReplica
from rayllm.text.outputs import accumulate


class FakeDriver:
    """Has adapters by name; cannot load those in `bad`."""

    def __init__(self, at_start=(), bad=()):
        self.loaded = dict(at_start)
        self.bad = set(bad)

    def load_adapter(self, name, path):
        assert name not in self.loaded
        if path in self.bad:
            raise ModelError(f"{path} is bad")
        self.loaded[name] = path

    def unload_adapter(self, name):
        del self.loaded[name]


def find(path):
    """A hub that has one adapter."""
    if path == "org/none":
        raise ModelError("adapter org/none is no folder here")
    return "/cache/sql" if path == "org/sql" else path


class Deployment:
    """Engines and API servers of one model, which follow one directory as long as the block lasts."""

    def __init__(self, num_servers=2, at_start=()):
        self.at_start = dict(at_start)
        self.directory = LocalDirectory()
        self.engines, self.fetched = {}, []
        self.servers = [
            FrontAdapters("m", True, self.at_start, self.directory, f"host of {number}", find)
            for number in range(num_servers)
        ]

    def add_engine(self, name, bad=()):
        driver = FakeDriver(self.at_start, bad)

        def fetch(folder, node_ids):
            self.fetched.append((name, folder, node_ids))

        self.engines[name] = (driver, ReplicaAdapters("m", driver, self.at_start, fetch))
        return driver

    async def __aenter__(self):
        self._following = asyncio.create_task(self._follow())
        return self

    async def __aexit__(self, *_):
        self._following.cancel()

    async def _follow(self):
        known = defaultdict(int)
        while True:
            for name, (_driver, adapters) in list(self.engines.items()):
                state = {"adapters": adapters.versions, "adapter_errors": adapters.errors}
                view = self.directory.ask(
                    EngineMember(name, "m", 0, f"host of {name}", Endpoint(f"ipc://{name}"), **state)
                )
                adapters.update(view)
            for number, server in enumerate(list(self.servers)):
                member = ServerMember(str(number), "here", ["m"], adapters_known=known[number])
                view = self.directory.ask(member)
                server.update(view)
                known[number] = adapters_known(view)
            await asyncio.sleep(0.002)


def run(scenario):
    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_all_engines_and_servers_have_it_when_the_call_returns():
    async def scenario():
        async with Deployment() as there:
            first, second = there.add_engine("one"), there.add_engine("two")
            one, two = there.servers
            await one.load("sql", "/sql")
            assert first.loaded == second.loaded == {"sql": "/sql"}
            assert one.versions == two.versions != {}
            late = there.add_engine("three")
            await until(lambda: late.loaded == {"sql": "/sql"})
            before = one.versions["sql"]
            await two.unload("sql")
            assert one.versions == two.versions == {}
            await until(lambda: not first.loaded and not second.loaded and not late.loaded)
            await two.load("sql", "/other")
            assert first.loaded == second.loaded == late.loaded == {"sql": "/other"}
            assert one.versions["sql"] > before, "other weights are another version"

    run(scenario)


def test_if_one_engine_refuses_none_has_it():
    async def scenario():
        async with Deployment() as there:
            first = there.add_engine("one")
            second = there.add_engine("two", bad=["/sql"])
            with pytest.raises(InvalidRequestError, match="an engine cannot load it: /sql is bad"):
                await there.servers[0].load("sql", "/sql")
            await until(lambda: not first.loaded and not second.loaded)
            assert there.servers[0].versions == there.servers[1].versions == {}
            second.bad.clear()
            await there.servers[1].load("sql", "/sql")
            assert first.loaded == second.loaded == {"sql": "/sql"}

    run(scenario)


def test_engines_fetch_it_from_whoever_may_have_it():
    async def scenario():
        async with Deployment() as there:
            first = there.add_engine("one")
            there.directory.ask(LaunchMember("launch", "head"))
            await there.servers[1].load("sql", "org/sql")
            assert first.loaded == {"sql": "/cache/sql"}
            assert there.fetched == [("one", "/cache/sql", ["host of 1", "head"])]
            late = there.add_engine("two")
            await until(lambda: late.loaded == {"sql": "/cache/sql"})
            assert there.fetched[1:] == [("two", "/cache/sql", ["host of 1", "head", "host of one"])]
            with pytest.raises(InvalidRequestError, match="lora_path: adapter org/none is no folder here"):
                await there.servers[0].load("law", "org/none")

    run(scenario)


def test_what_is_refused_at_once():
    async def scenario():
        async with Deployment() as there:
            there.add_engine("one")
            server = there.servers[0]
            with pytest.raises(InvalidRequestError, match="lora_path must be the absolute path"):
                await server.load("sql", "sql")
            await server.load("sql", "/sql")
            with pytest.raises(InvalidRequestError, match="'sql' is loaded already"):
                await server.load("sql", "/sql")
            with pytest.raises(InvalidRequestError, match="no adapter 'x' is loaded"):
                await server.unload("x")
            with pytest.raises(InvalidRequestError, match="need the option enable_lora"):
                await FrontAdapters("m", False, {}, there.directory).load("sql", "/sql")

    run(scenario)


def test_of_two_calls_for_one_name_one_is_refused():
    async def scenario():
        async with Deployment() as there:
            driver = there.add_engine("one")
            calls = [server.load("sql", f"/{n}") for n, server in enumerate(there.servers)]
            results = await asyncio.gather(*calls, return_exceptions=True)
            kinds = sorted(type(result).__name__ for result in results)
            assert kinds == ["InvalidRequestError", "NoneType"]
            winner = results.index(None)
            await until(lambda: driver.loaded == {"sql": f"/{winner}"})
            assert there.servers[0].versions == there.servers[1].versions != {}

    run(scenario)


@pytest.mark.parametrize("late", ["is_ready", "gone"])
def test_a_call_that_another_one_has_replaced_changes_nothing(late):
    """Also if what it decides last comes after the other's first decision: that all have it, or that it is to go."""

    class Slow:
        """The first call's last decision waits until the second call's record is there."""

        def __init__(self, directory):
            self._directory, self._second = directory, threading.Event()

        def decide(self, records):
            record = records[0]
            last = record.path == "/first" and record.is_ready if late == "is_ready" else not record.path
            if last:
                assert self._second.wait(30)
            self._directory.decide(records)
            if record.path == "/second":
                self._second.set()

    async def scenario():
        async with Deployment() as there:
            driver = there.add_engine("one", bad=["/first"] if late == "gone" else [])
            slow = Slow(there.directory)
            first, second = (FrontAdapters("m", True, {}, slow, "here", find) for _ in range(2))
            there.servers += [first, second]
            earlier = asyncio.create_task(first.load("sql", "/first"))
            await until(lambda: driver.loaded or any(each.errors for _, each in there.engines.values()))
            await second.load("sql", "/second")
            with pytest.raises(InvalidRequestError):
                await earlier
            await until(lambda: driver.loaded == {"sql": "/second"})
            assert all(server.versions == second.versions != {} for server in there.servers)

    run(scenario)


def test_adapters_of_the_options_can_go_and_come_back():
    async def scenario():
        async with Deployment(at_start={"sql": "/sql", "law": "/law"}) as there:
            driver = there.add_engine("one")
            server = there.servers[0]
            assert server.versions == {"sql": 0, "law": 0}
            await server.unload("sql")
            assert server.versions == {"law": 0}
            await until(lambda: driver.loaded == {"law": "/law"})
            late = there.add_engine("two")  # its options still have it
            await until(lambda: late.loaded == {"law": "/law"})
            await server.load("sql", "/new")
            assert driver.loaded == late.loaded == {"law": "/law", "sql": "/new"}

    run(scenario)


def test_a_new_directory_hears_of_them_again():
    """As `DirectoryLink.ask` does it; decisions that are older than what it knows change nothing."""
    directory = LocalDirectory().directory
    old, new = (LoraRecord("m", "sql", f"/{n}", "here", version=n, changed=n) for n in (1, 2))
    directory.decide([new])
    first = directory.beat()
    assert first.adapters == [new]
    directory.decide([old])
    again = directory.beat(None, first)
    assert (again.adapters, first.updated(again).adapters) == (None, [new]), "nothing has changed"
    other = LocalDirectory().directory
    assert other.beat(None, first).adapters == []
    other.decide(first.adapters)
    assert other.beat(None, first).adapters == [new]
    gone = LoraRecord("m", "sql", "", "", version=3, changed=3)
    other.decide([gone])
    assert adapters_known(other.beat()) == 3


def test_two_replicas_serve_what_was_loaded(tmp_path):
    """Real engines behind sockets, and a front; also while streams run, and for prompts that both have cached."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    folder = make_model(tmp_path / "model", "llama")
    paths = {name: make_adapter(tmp_path / name, folder, seed=n, size=0.6) for n, name in enumerate(("a", "b"))}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rng = random.Random(0)
    prompt = [rng.randrange(250) for _ in range(40)]
    expected = {}
    for name, path in {"": None, **paths}.items():
        with merged(model, path):
            expected[name] = greedy(model, [prompt], 6)[0]
    assert len({tuple(tokens) for tokens in expected.values()}) == 3
    options = EngineConfig(model=folder, device="cpu", skip_tokenizer_init=True, enable_lora=True, max_loras=2)

    async def scenario():
        directory, replicas = LocalDirectory(), []
        for name in ("one", "two"):
            replica = EngineReplica.__new__(EngineReplica)
            await replica.__init__(resolve(options, 0), "m", 1.0, place=place(name), registry=directory)
            replicas.append(replica)
        described = FrontModel(name="m", folder=folder, skip_tokenizer_init=True, enable_lora=True)
        front = ModelFront(described, None, "me", "here", directory=directory)
        server = ServerMember("me", "here", ["m"])

        async def follow():
            nonlocal server
            while True:
                view = directory.ask(server)
                front.lora.update(view)
                await front.update(view.engines, KEYS)
                server = ServerMember("me", "here", ["m"], adapters_known=adapters_known(view))
                await asyncio.sleep(0.01)

        async def tokens_of(adapter, number):
            params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
            request = GenerationRequest(
                request_id=f"{adapter}{number}", prompt_token_ids=prompt, params=params, adapter=adapter
            )
            total = None
            async for output in front.generate(request):
                total = accumulate(total, output)
            return total.outputs[0].token_ids

        following = asyncio.create_task(follow())
        await until(lambda: front.num_replicas == 2)
        plain = asyncio.gather(*(tokens_of("", number) for number in range(8)))
        await front.load_adapter("x", paths["a"])
        assert front.adapters == ["x"]
        found = await asyncio.gather(*(tokens_of(["x", ""][number % 2], 100 + number) for number in range(12)))
        assert found == [expected["a"], expected[""]] * 6
        assert await plain == [expected[""]] * 8
        await front.unload_adapter("x")
        await until(lambda: not any("x" in engine.adapters for engine in directory.ask().engines))
        with pytest.raises(InvalidRequestError, match="is not loaded"):
            await tokens_of("x", 200)
        await front.load_adapter("x", paths["b"])
        assert await asyncio.gather(*(tokens_of("x", 300 + number) for number in range(8))) == [expected["b"]] * 8
        with pytest.raises(InvalidRequestError, match="an engine cannot load it: adapter folder /nothing"):
            await front.load_adapter("y", "/nothing")
        following.cancel()
        await front.close()
        for replica in replicas:
            await replica.__del__()

    asyncio.run(asyncio.wait_for(scenario(), 120))


class SlowCore(FakeCore):
    """With adapters, which take a second to read; refuses requests as EngineCore does."""

    def prepare_adapter(self, name, path):
        time.sleep(1.0)
        return name

    def add_adapter(self, prepared):
        self.adapters = [*self.adapters, prepared]

    def add(self, request):
        if request.adapter and request.adapter not in self.adapters:
            raise InvalidRequestError(f"the adapter {request.adapter!r} is not loaded", "model")
        super().add(request)
        if request.emitted is not None:
            self._live[request.request_id] = (request, len(request.emitted[0]))

    def step(self):
        time.sleep(0.02)
        return super().step()


async def slow_replica(name, directory):
    made = EngineReplica.__new__(EngineReplica)
    await made.__init__(None, "m", 1.0, start=lambda _config: SlowCore(), place=place(name), registry=directory)
    return made


def test_a_request_with_an_adapter_goes_on_on_an_engine_that_starts(tmp_path):
    """Which reads the adapters that were loaded before, and gets no request until it has."""

    async def check():
        directory = LocalDirectory()
        first = asyncio.create_task(slow_replica("one", directory))
        front = ModelFront(FrontModel(name="m", folder="", enable_lora=True), None, "me", "here", directory=directory)

        async def follow():
            known = []
            while True:
                view = directory.ask(ServerMember("me", "here", ["m"], adapters_known=known))
                front.lora.update(view)
                await front.update(list(view.engines), KEYS)
                known = adapters_known(view)
                await asyncio.sleep(0.01)

        following, first = asyncio.create_task(follow()), await first
        await until(lambda: front.num_replicas == 1)
        await front.load_adapter("sql", str(tmp_path))

        async def run():
            params = SamplingParams(max_tokens=100, ignore_eos=True)
            request = GenerationRequest(request_id="r", prompt_token_ids=[1, 2], params=params, adapter="sql")
            total = None
            async for output in front.generate(request):
                total = accumulate(total, output)
            return total.outputs[0]

        task = asyncio.create_task(run())
        await asyncio.sleep(0.5)
        await asyncio.to_thread(first._driver.shutdown)
        await asyncio.to_thread(first._socket.close)
        with pytest.raises(EngineDeadError):
            await first.check_health()
        first._membership._following.cancel()
        directory.leave("one")
        second = await slow_replica("two", directory)
        output = await asyncio.wait_for(task, 20)
        assert (len(output.token_ids), output.finish_reason) == (100, "length")
        following.cancel()
        await front.close()
        await second.__del__()

    asyncio.run(check())
