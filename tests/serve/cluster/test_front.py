"""How an API server follows a model's replicas and spreads requests over them, with fake engines."""

import asyncio
import random

import msgspec
import pytest
from rayllm.serve.cluster.relay import RelayClient
from support.serve import INFO, FakeHandle, until

from rayllm.api.sampling_params import SamplingParams
from rayllm.api.types import CompletionOutput, EngineStats, GenerationRequest, Load, RequestOutput
from rayllm.config.options import ServerConfig
from rayllm.errors import EngineDeadError
from rayllm.serve.cluster import front as model_front
from rayllm.serve.cluster.front import FrontModel, ModelFront
from rayllm.serve.cluster.router import ROUTING_BLOCK, Router
from rayllm.serve.http.errors import ApiError


class FakeEngine:
    """Stands in for AsyncEngine: a request goes on when `tick` is set, and has `max_tokens` outputs."""

    all = []

    def __init__(self, client, _tokenizer):
        self.client = client
        self.dead = None
        self.closed = False
        self.requests = []
        self.tick = asyncio.Semaphore(0)
        FakeEngine.all.append(self)

    async def start(self):
        if self.name == "unreachable":
            raise EngineDeadError("no engine answers")

    async def close(self):
        self.closed = True

    @property
    def name(self):
        return self.client._replica_id if isinstance(self.client, RelayClient) else self.client._address[6:]

    async def stats(self):
        if self.name == "silent":
            await asyncio.sleep(60)
        return EngineStats(num_running=len(self.requests))

    async def generate(self, request, prompt_text=None):
        self.requests.append(request.request_id)
        for step in range(request.params.max_tokens):
            await self.tick.acquire()
            if self.dead:
                raise EngineDeadError(self.dead)
            last = step == request.params.max_tokens - 1
            parts = [
                CompletionOutput(i, "x", [7], finish_reason="length" if last else None) for i in range(request.params.n)
            ]
            yield RequestOutput(request.request_id, prompt_text, request.prompt_token_ids, parts, last)


@pytest.fixture(autouse=True)
def fake_engines(monkeypatch):
    monkeypatch.setattr("rayllm.engine.async_engine.AsyncEngine", FakeEngine)
    monkeypatch.setattr(model_front, "node_id", lambda: "here")
    monkeypatch.setattr(model_front, "WATCH_S", 0.01)
    monkeypatch.setattr(model_front, "Router", lambda: Router(random.Random(1)))
    FakeEngine.all = []


def run(handle, scenario, server=ServerConfig(), max_num_seqs=4):
    """Run scenario(front) with a front that has met the replicas."""

    async def body():
        front = ModelFront(
            FrontModel(name="m", folder="", server=server, max_num_seqs=max_num_seqs), handle, None, "me"
        )
        await front.start()
        try:
            await asyncio.wait_for(scenario(front), 20)
        finally:
            await front.close()

    asyncio.run(body())
    assert all(engine.closed for engine in FakeEngine.all if engine.name != "unreachable")


def engine(name):
    """The newest connection to a replica."""
    return [each for each in FakeEngine.all if each.name == name][-1]


def request(request_id="r", tokens=ROUTING_BLOCK, max_tokens=1, n=1, first=0):
    ids = list(range(first, first + tokens))
    return GenerationRequest(
        request_id=request_id, prompt_token_ids=ids, params=SamplingParams(max_tokens=max_tokens, n=n)
    )


def engine_or_none(front):
    try:
        return front.engine()
    except EngineDeadError:
        return None


async def consume(stream):
    return [output async for output in stream]


async def start(front, *args, **fields):
    """A request that runs; its task."""
    before = sum(len(each.requests) for each in FakeEngine.all)
    task = asyncio.create_task(consume(front.generate(request(*args, **fields))))
    await until(lambda: sum(len(each.requests) for each in FakeEngine.all) == before + 1)
    return task


# ---- following replicas


def test_a_restarted_replica_is_followed():
    handle = FakeHandle("one")

    async def scenario(front):
        assert await front.unhealthy_reason() is None
        del handle.reports["one"]
        await until(lambda: engine_or_none(front) is None)
        assert engine("one").closed
        assert await front.unhealthy_reason() == "the engine is being restarted"
        with pytest.raises(EngineDeadError, match="restarted"):
            await consume(front.generate(request()))
        handle.add("two")
        await until(lambda: engine_or_none(front) is not None)
        assert front.num_replicas == 1

    run(handle, scenario)


def test_a_broken_connection_is_made_anew():
    handle = FakeHandle("one")

    async def scenario(front):
        first = engine("one")
        handle.broken = True  # nothing new is heard, but a dead engine is known at once
        first.dead = "the connection was closed"
        with pytest.raises(EngineDeadError, match="the connection was closed"):
            front.engine()
        handle.broken = False
        await until(lambda: engine_or_none(front) is not None)
        assert first.closed
        assert engine("one") is not first

    run(handle, scenario)


def test_replicas_are_used_while_nobody_can_be_asked():
    handle = FakeHandle("one")

    async def scenario(front):
        handle.broken = True
        heard = len(handle.heard)
        await until(lambda: len(handle.heard) > heard + 3)
        assert front.engine() is front
        assert not engine("one").closed

    run(handle, scenario)


def test_a_replica_that_cannot_be_reached_is_tried_again():
    handle = FakeHandle("unreachable")

    async def scenario(front):
        assert engine_or_none(front) is None
        assert "no engine answers" in await front.unhealthy_reason()
        await until(lambda: len(FakeEngine.all) > 2)

    run(handle, scenario)


@pytest.mark.parametrize("drains", [True, False])
def test_who_leaves_gets_nothing_new_and_finishes_what_it_has(drains):
    handle = FakeHandle("one", "two")

    async def scenario(front):
        running = await start(front, "a", max_tokens=2)
        old = next(each for each in FakeEngine.all if each.requests)
        other = next(each for each in FakeEngine.all if each is not old)
        if drains:
            handle.change(old.name, draining=True)
        else:
            del handle.reports[old.name]
        await until(lambda: front.num_replicas == 1)
        tasks = [await start(front, f"b{i}", first=100 * i) for i in range(20)]
        assert old.requests == ["a"]
        assert len(other.requests) == 20
        assert not old.closed
        old.tick.release()
        old.tick.release()
        assert (await running)[-1].finished
        await until(lambda: old.closed)
        for _ in tasks:
            other.tick.release()
        await asyncio.gather(*tasks)
        if drains:
            handle.change(other.name, draining=True)
            await until(lambda: engine_or_none(front) is None)
            assert await front.unhealthy_reason() == "the server is shutting down"

    run(handle, scenario)


def test_a_report_that_is_missing_once_does_no_harm():
    handle = FakeHandle("one")

    async def scenario(front):
        running = await start(front, max_tokens=1)
        report, handle.reports["one"] = handle.reports["one"], ConnectionError("slow")
        await until(lambda: engine_or_none(front) is None)
        handle.reports["one"] = report
        await until(lambda: engine_or_none(front) is not None)
        assert len(FakeEngine.all) == 1
        engine("one").tick.release()
        await running

    run(handle, scenario)


def test_requests_of_a_dead_replica_fail_and_new_ones_go_elsewhere():
    handle = FakeHandle("one", "two")

    async def scenario(front):
        tasks = {
            request_id: await start(front, request_id, first=first) for request_id, first in (("a", 0), ("b", 500))
        }
        dead = next(each for each in FakeEngine.all if "a" in each.requests)
        alive = next(each for each in FakeEngine.all if each is not dead)
        assert alive.requests == ["b"]
        dead.dead = "a worker was lost"
        dead.tick.release()
        with pytest.raises(EngineDeadError, match="a worker was lost"):
            await tasks["a"]
        handle.reports = {name: report for name, report in handle.reports.items() if name != dead.name}
        tasks["c"] = await start(front, "c")
        assert alive.requests == ["b", "c"]
        for _ in range(2):
            alive.tick.release()
        await asyncio.gather(tasks["b"], tasks["c"])
        assert await front.unhealthy_reason() is None

    run(handle, scenario)


def test_an_unhealthy_replica_is_avoided_as_long_as_there_is_another():
    handle = FakeHandle("one", "two")

    async def scenario(front):
        handle.change("one", unhealthy="no step has finished")
        await until(lambda: front.num_replicas == 1)
        assert await front.unhealthy_reason() is None
        tasks = [await start(front, str(i)) for i in range(5)]
        assert len(engine("two").requests) == 5
        handle.change("two", unhealthy="no step has finished here either")
        await until(lambda: front.num_replicas == 2)
        assert "no step has finished" in await front.unhealthy_reason()
        tasks.append(await start(front, "last"))  # better late than refused
        for each in ("one", "two"):
            for _ in tasks:
                engine(each).tick.release()
        await asyncio.gather(*tasks)

    run(handle, scenario)


def test_a_replica_on_another_node_is_relayed_to():
    handle = FakeHandle()
    handle.add("far", node_id="elsewhere")

    async def scenario(front):
        client = engine("far").client
        assert isinstance(client, RelayClient)
        assert client.info() == handle.reports["far"].info

    run(handle, scenario)


# ---- loads and figures


def test_loads_of_requests_end_with_them():
    handle = FakeHandle("one")

    async def scenario(front):
        task = await start(front, tokens=100, max_tokens=3, n=2)

        async def reported(load):
            await until(lambda: handle.heard[-1].loads == {"one": load})

        await reported(Load(2, 100))
        engine("one").tick.release()
        await reported(Load(2, 0))
        for _ in range(2):
            engine("one").tick.release()
        await task
        await reported(Load())
        left = await start(front, "left", tokens=3 * ROUTING_BLOCK, max_tokens=3)
        await reported(Load(1, 0))  # all of it is cached, as far as is known
        left.cancel()
        await reported(Load())

    run(handle, scenario)


def test_all_replicas_together_set_the_limit():
    handle = FakeHandle("one", "two")
    server = ServerConfig(max_queued_requests=1)

    async def scenario(front):
        tickets = [front.admission.enter() for _ in range(9)]
        with pytest.raises(ApiError, match="8 running and 1 queued"):
            front.admission.enter()
        for ticket in tickets:
            ticket.close()
        handle.change("one", others_total=Load(5, 70))
        handle.change("two", draining=True, others_total=Load(4, 70))
        await until(lambda: front.num_replicas == 1 and front.admission.others == Load(5, 70))
        with pytest.raises(ApiError, match="takes 4 running and 1 queued"):
            front.admission.enter()

    run(handle, scenario, server)


def test_other_servers_load_counts_in_the_choice():
    handle = FakeHandle("one", "two")

    async def scenario(front):
        handle.change("one", others_here=Load(50, 0))
        await until(lambda: front._replicas["one"].load == Load(50, 0))
        tasks = [await start(front, str(i), first=100 * i) for i in range(10)]
        assert len(engine("two").requests) == 10
        for _ in tasks:
            engine("two").tick.release()
        await asyncio.gather(*tasks)

    run(handle, scenario)


def test_prompts_go_where_their_beginning_is():
    handle = FakeHandle("one", "two", "three")

    async def scenario(front):
        async def place(request_id, first):
            task = await start(front, request_id, tokens=4 * ROUTING_BLOCK, first=first)
            place = next(each for each in FakeEngine.all if request_id in each.requests)
            place.tick.release()
            await task
            return place.name

        places = [await place(f"{i}-{first}", 1000 * first) for first in range(6) for i in range(4)]
        assert all(len(set(places[i : i + 4])) == 1 for i in range(0, 24, 4))
        assert len(set(places)) > 1

    run(handle, scenario)


def test_figures_of_all_servers_add_up():
    handle = FakeHandle("one", "two")

    async def scenario(front):
        front.metrics.finished["stop"].inc()
        handle.change("one", metrics={"me": b"old"})
        handle.change("two", metrics={"me": b"old", "gone": b"1", "other": b"2"})
        await until(lambda: len(front._figures) == 3)
        assert sorted(front.peer_metrics()) == [b"1", b"2"]
        await until(lambda: handle.heard[-1].metrics == front.metrics.snapshot())

    run(handle, scenario)


def test_stats_of_replicas_that_answer(monkeypatch):
    monkeypatch.setattr(model_front, "STATS_TIMEOUT_S", 0.05)
    handle = FakeHandle("one", "two", "silent")

    async def scenario(front):
        assert set(await front.stats()) == {"0", "1"}
        handle.change("two", index=0)
        await until(lambda: front._replicas["two"].report.index == 0)
        assert set(await front.stats()) == {"0", "two"}
        engine("one").dead = "gone"
        assert set(await front.stats()) <= {"0"}

    run(handle, scenario)


def test_the_smallest_context_is_what_counts():
    """During an update replicas of two configs run."""
    handle = FakeHandle("one", "two")

    async def scenario(front):
        engine("one").info = INFO
        engine("two").info = msgspec.structs.replace(INFO, max_model_len=32)
        assert front.info.max_model_len == 32

    run(handle, scenario)
