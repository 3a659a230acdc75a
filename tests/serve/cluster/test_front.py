"""How an API server follows a model's engines and spreads requests over them, with clients that are not connected."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from support.driver import INFO, fake_request, until
from support.serve import KEYS, engine_member

from rayllm import timeouts
from rayllm.api.types import EngineStats, IdempotencyKey, Load, TokenDelta
from rayllm.api.wire import VERSION, EngineBeat, Snapshot
from rayllm.config.options import ServerConfig
from rayllm.errors import EngineDeadError
from rayllm.serve.cluster.front import RELAYS, FrontModel, ModelFront
from rayllm.serve.cluster.router import ROUTING_BLOCK
from rayllm.serve.http.errors import ApiError
from rayllm.serve.http.limits import Ticket
from rayllm.text.outputs import accumulate


class FakeClient:
    """Stands in for EngineClient: a request goes on when `tick` is set, and has `max_tokens` outputs."""

    def __init__(self, cluster, address, tokenizer, *, front_id, beat, on_change, server_key, keys):
        self.address, self.front_id, self.beat, self.on_change = address, front_id, beat, on_change
        self.server_key, self.keys = server_key, keys
        self.info = cluster.info
        self.engine_beat = EngineBeat()
        self.peer_metrics = {}
        self._dead = None
        self.closed = False
        self.soon = {}  # what it says when it is asked
        self.told = []
        self.requests, self.seeds, self.sent, self.states = [], [], [], []
        self.keys_known, self.asked = set(), []
        self.tick = asyncio.Semaphore(0)
        self._cluster = cluster

    @property
    def dead(self):
        return self._dead

    @dead.setter
    def dead(self, reason):
        self._dead = reason
        self.on_change()

    def tell(self):
        self.told.append(self.beat().here)

    async def ask(self):
        self.says(**self.soon)

    @property
    def name(self):
        return self.address.partition("://")[2]

    async def connect(self):
        if self.name in self._cluster.unreachable:
            self.closed = True
            raise EngineDeadError("no engine answers")
        if self.name in self._cluster.mute:
            await asyncio.Event().wait()

    async def close(self):
        self.closed = True

    async def knows(self, key_id):
        self.asked.append(key_id)
        return key_id in self.keys_known and self.dead is None

    def says(self, **fields):
        self.engine_beat = msgspec.structs.replace(self.engine_beat, **fields)
        self.on_change()

    async def run(self, state):
        request = state.to_send()
        self.sent.append(request)
        self.states.append(state)
        self.requests.append(request.request_id)
        self.seeds.append(request.noise_seed)
        while state.running:
            await self.tick.acquire()
            if self.dead:
                raise EngineDeadError(self.dead)
            total = None
            for index, completion in list(state.running.items()):
                last = len(completion.token_ids) + 1 == request.params.max_tokens
                delta = TokenDelta(request.request_id, index, [7], finish_reason="length" if last else None)
                total = accumulate(total, state.advance(delta))
            yield total


class Cluster:
    """A front on the node "here", and what the directory says of engines. clients: all that were made."""

    def __init__(self, *members, server=ServerConfig(), max_num_seqs=4, index=0):
        self.members = {each.member_id: each for each in members}
        self.clients, self.unreachable, self.mute = [], set(), set()
        self.info = msgspec.structs.replace(INFO, max_num_seqs=max_num_seqs)  # of engines that start now

        def connect(*args, **fields):
            self.clients.append(FakeClient(self, *args, **fields))
            return self.clients[-1]

        model = FrontModel(name="m", folder="", server=server)
        self.front = ModelFront(model, None, "me", "here", index, connect)

    def client(self, name):
        """The newest connection to an engine."""
        return [each for each in self.clients if each.name == name][-1]

    async def update(self):
        """What happens a few times: the front is told what the directory knows."""
        for _ in range(3):
            await self.front.update(list(self.members.values()), KEYS)
            await asyncio.sleep(0.001)

    async def start(self, *args, **fields):
        """A request that runs; its task."""
        before = sum(len(each.requests) for each in self.clients)
        task = asyncio.create_task(consume(self.front.generate(request(*args, **fields))))
        await until(lambda: sum(len(each.requests) for each in self.clients) == before + 1)
        return task


def scenario(*names, **options):
    """Runs the test with a cluster of engines of these names on this node, and a front that has met them."""

    def decorate(test):
        def run():
            async def body():
                cluster = Cluster(*(engine_member(name, index=i) for i, name in enumerate(names)), **options)
                await cluster.update()
                try:
                    await asyncio.wait_for(test(cluster), 20)
                finally:
                    await cluster.front.close()
                connected = [each for each in cluster.clients if each.name not in cluster.mute]
                assert all(each.closed for each in connected)

            asyncio.run(body())

        run.__name__ = test.__name__
        return run

    return decorate


def request(request_id="r", tokens=ROUTING_BLOCK, max_tokens=1, n=1, first=0):
    return fake_request(request_id, max_tokens, list(range(first, first + tokens)), n=n)


async def consume(stream):
    return [output async for output in stream]


# ---- limits


@scenario(server=ServerConfig(max_queued_requests=0))
async def test_as_many_run_as_the_engines_say(cluster):
    """Engines know their own number, and may differ."""
    front = cluster.front
    assert front.admission.max_live == 0
    cluster.members["one"] = engine_member("one")
    await front.update(list(cluster.members.values()), KEYS)
    await until(lambda: front.num_replicas == 1)
    assert front.admission.max_live == 4, "at once, not when the directory is heard the next time"
    cluster.info = msgspec.structs.replace(INFO, max_num_seqs=1024)
    cluster.members["two"] = engine_member("two")
    await cluster.update()
    assert front.admission.max_live == 1028
    for client in cluster.clients:
        client.dead = "gone"
    cluster.members.clear()
    await cluster.update()
    assert front.admission.max_live == 1028, "as before, while there is none"


# ---- noise


def seeds_sent(engine_seed, index=0):
    """The seeds of ten requests that bring none, over two replicas."""
    seeds = []

    @scenario("one", "two", index=index)
    async def run(cluster):
        for client in cluster.clients:
            client.info = msgspec.structs.replace(INFO, seed=engine_seed)
            for _ in range(10):
                client.tick.release()
        for number in range(10):
            await consume(cluster.front.generate(request(f"r{number}", first=ROUTING_BLOCK * number)))
        assert all(client.seeds for client in cluster.clients)
        seeds.extend(seed for client in cluster.clients for seed in client.seeds)

    run()
    return set(seeds)


def test_no_two_replicas_and_no_two_starts_get_the_same_noise():
    assert len(seeds_sent(None) | seeds_sent(None)) == 20


def test_an_engine_with_a_seed_gets_the_same_noise_after_every_start():
    assert seeds_sent(5) == seeds_sent(5)
    assert len(seeds_sent(5) | seeds_sent(6) | seeds_sent(5, index=1)) == 30, "other API servers have their own"


# ---- following engines


@scenario("one")
async def test_a_restarted_engine_is_followed(cluster):
    front = cluster.front
    assert await front.unhealthy_reason() is None
    cluster.client("one").dead = "the connection was closed"
    cluster.members = {}
    await cluster.update()
    assert cluster.client("one").closed
    assert await front.unhealthy_reason() == "the connection was closed"
    with pytest.raises(EngineDeadError, match="the connection was closed"):
        await consume(front.generate(request()))
    cluster.members["two"] = engine_member("two")
    await cluster.update()
    assert front.engine() is front and front.num_replicas == 1


@scenario("one")
async def test_a_broken_connection_is_made_anew(cluster):
    first = cluster.client("one")
    first.dead = "the engine has been silent"
    with pytest.raises(EngineDeadError, match="silent"):
        cluster.front.engine()
    await cluster.update()
    assert first.closed
    assert cluster.client("one") is not first
    assert cluster.front.engine()


@scenario("one")
async def test_engines_that_the_directory_misses_are_used_as_long_as_they_answer(cluster):
    cluster.members = {}
    await cluster.update()
    assert cluster.front.engine()
    assert not cluster.client("one").closed


@scenario()
async def test_an_engine_that_cannot_be_reached_is_tried_again(cluster):
    cluster.unreachable.add("one")
    assert await cluster.front.unhealthy_reason() == "the engine is starting"
    cluster.members["one"] = engine_member("one")
    await cluster.update()
    assert cluster.front.num_replicas == 0
    assert "no engine answers" in await cluster.front.unhealthy_reason()
    await cluster.update()
    assert len(cluster.clients) > 2
    cluster.unreachable.clear()
    await cluster.update()
    assert cluster.front.num_replicas == 1


@scenario()
async def test_engines_elsewhere_are_reached_by_tcp_with_keys(cluster):
    cluster.members = {"far": engine_member("far", "elsewhere"), "near": engine_member("near", tcp="tcp://here:1")}
    await cluster.update()
    assert [each.address for each in cluster.clients] == ["ipc://near"], "the other one does not listen there yet"
    near = cluster.client("near")
    assert (near.front_id, near.server_key, near.keys) == ("me", "", None)
    cluster.members["far"] = engine_member("far", "elsewhere", tcp="tcp://there:1")
    await cluster.update()
    far = cluster.client("there:1")
    assert (far.server_key, far.keys) == ("k" * 40, KEYS)


@scenario("one", "two")
async def test_an_engine_that_drains_gets_nothing_new_and_finishes_what_it_has(cluster):
    running = await cluster.start("a", max_tokens=2)
    old = next(each for each in cluster.clients if each.requests)
    other = next(each for each in cluster.clients if each is not old)
    old.says(draining=True)
    cluster.members[old.name] = msgspec.structs.replace(cluster.members[old.name], draining=True)
    await cluster.update()
    assert cluster.front.num_replicas == 1
    tasks = [await cluster.start(f"b{i}", first=100 * i) for i in range(20)]
    assert (old.requests, len(other.requests)) == (["a"], 20)
    assert not old.closed
    old.tick.release()
    old.tick.release()
    assert (await running)[-1].finished
    await cluster.update()
    assert old.closed, "by which the engine knows that it may end"
    assert len(cluster.clients) == 2, "nobody connects to it again"
    for _ in tasks:
        other.tick.release()
    await asyncio.gather(*tasks)
    other.says(draining=True)
    assert cluster.front.num_replicas == 0
    assert await cluster.front.unhealthy_reason() == "the server is shutting down"


@scenario("one", "two")
async def test_requests_of_a_dead_engine_go_on_elsewhere(cluster):
    tasks = {"a": await cluster.start("a", max_tokens=5, n=2), "b": await cluster.start("b", first=500)}
    dead = next(each for each in cluster.clients if "a" in each.requests)
    alive = next(each for each in cluster.clients if each is not dead)
    assert alive.requests == ["b"]
    for _ in range(2):
        dead.tick.release()
        await asyncio.sleep(0.01)
    dead.dead = "a worker was lost"
    dead.tick.release()
    await until(lambda: alive.requests == ["b", "a"])
    went_on = alive.sent[-1]
    assert (went_on.emitted, went_on.num_deaths) == ({0: [7, 7], 1: [7, 7]}, 1)
    assert went_on.noise_seed == dead.sent[0].noise_seed
    assert dead.beat().here == Load()
    assert alive.beat().here.completions == 3
    for _ in range(4):
        alive.tick.release()
    outputs = await tasks["a"]
    assert [sum(len(each.outputs[i].token_ids) for each in outputs) for i in range(2)] == [5, 5]
    assert [each.num_recoveries for each in outputs] == [0, 0, 1, 1, 1]
    await tasks["b"]
    assert alive.beat().here == Load()
    assert await cluster.front.unhealthy_reason() is None


@scenario("one")
async def test_without_another_engine_a_request_waits_for_the_next_one(cluster):
    task = await cluster.start("a", max_tokens=2)
    old = cluster.client("one")
    old.dead = "a worker was lost"
    old.tick.release()
    del cluster.members["one"]
    await cluster.update()
    with pytest.raises(EngineDeadError, match="a worker was lost"):  # new ones do not
        await consume(cluster.front.generate(request("new")))
    cluster.members["two"] = engine_member("two")
    await cluster.update()
    await until(lambda: cluster.client("two").requests == ["a"])
    assert cluster.client("two").sent[0].emitted is None, "it had not begun"
    for _ in range(2):
        cluster.client("two").tick.release()
    assert (await task)[-1].finished


@scenario("one")
async def test_a_request_of_an_engine_that_was_to_end_goes_on_and_that_is_no_death(cluster):
    task = await cluster.start("a", max_tokens=3)
    one = cluster.client("one")
    one.tick.release()
    await until(lambda: one.states[0].to_send().emitted == {0: [7]})
    one.says(draining=True)
    one.dead = "it was shut down"
    one.tick.release()
    await asyncio.sleep(0.05)
    assert not task.done(), "another one may come"
    cluster.members = {"two": engine_member("two")}
    await cluster.update()
    two = cluster.client("two")
    await until(lambda: two.sent)
    assert (two.sent[0].emitted, two.sent[0].num_deaths) == ({0: [7]}, 0)
    for _ in range(2):
        two.tick.release()
    assert (await task)[-1].finished


@pytest.mark.parametrize("why", ["nobody comes", "all ends", "the server ends"])
def test_a_request_ends_where_nobody_takes_over(why, monkeypatch):
    monkeypatch.setattr(timeouts, "RESUME_S", 0.05 if why == "nobody comes" else 60)

    @scenario("one")
    async def body(cluster):
        task = await cluster.start("a", max_tokens=2)
        client = cluster.client("one")
        client.says(draining=True)
        client.dead = "it was shut down"
        cluster.front.is_last = why == "all ends"
        client.tick.release()
        await asyncio.sleep(0.01)
        if why == "the server ends":
            await cluster.front.close()
        with pytest.raises(EngineDeadError):
            await task

    body()


@scenario("one", "two", "three")
async def test_a_request_with_a_key_goes_to_the_engine_that_has_it(cluster):
    """Also when it drains; without one it goes where the router says, and begins there with noise of the key's own."""
    two = cluster.client("two")
    two.keys_known.add("k")
    two.says(draining=True)
    keyed = msgspec.structs.replace(request(max_tokens=2), key=IdempotencyKey("k", b"", 1))
    first = asyncio.create_task(consume(cluster.front.generate(keyed)))
    await until(lambda: two.requests)
    assert all(client.asked == ["k"] for client in cluster.clients)
    two.dead = "gone"
    two.tick.release()
    await until(lambda: sum(len(client.requests) for client in cluster.clients) == 2)
    taken = next(client for client in cluster.clients if client.requests and client is not two)
    for _ in range(2):
        taken.tick.release()
    assert (await first)[-1].finished
    assert taken.seeds == two.seeds == [keyed.key.seed]
    await cluster.start("without a key")
    assert all(len(client.asked) == 2 for client in cluster.clients)


@scenario("one", "two", "three")
async def test_a_request_that_engines_die_of_ends(cluster):
    """Of three engines the third had it alone."""
    task = await cluster.start("a", max_tokens=5)
    for deaths in range(3):
        client = next(each for each in cluster.clients if each.requests and each.dead is None)
        assert client.sent[0].num_deaths == deaths
        if deaths == 2:
            assert client.states[0].advance(TokenDelta("a", 0, [], alone=True)) is None
        client.dead = "killed"
        client.tick.release()
        await asyncio.sleep(0.05)
    (output,) = await task
    assert output.finished
    assert output.outputs[0].finish_reason == "error"
    assert "engines died 3 times" in output.outputs[0].stop_reason


@scenario("one", "two")
async def test_an_unhealthy_engine_is_avoided_as_long_as_there_is_another(cluster):
    front, one, two = cluster.front, cluster.client("one"), cluster.client("two")
    one.says(unhealthy="no step has finished")
    assert await front.unhealthy_reason() is None
    tasks = [await cluster.start(str(i)) for i in range(5)]
    assert len(two.requests) == 5
    two.says(unhealthy="no step has finished here either")
    assert "no step has finished" in await front.unhealthy_reason()
    tasks.append(await cluster.start("last"))  # better late than refused
    for each in (one, two):
        for _ in tasks:
            each.tick.release()
    await asyncio.gather(*tasks)


# ---- loads and figures


@scenario("one")
async def test_loads_of_requests_end_with_them(cluster):
    client = cluster.client("one")
    task = await cluster.start(tokens=100, max_tokens=3, n=2)
    assert client.beat().here == Load(2, 100)
    assert client.told == [Load(2, 100)]
    client.tick.release()
    await until(lambda: client.beat().here == Load(2, 0))
    for _ in range(2):
        client.tick.release()
    await task
    assert client.beat().here == Load()
    left = await cluster.start("left", tokens=3 * ROUTING_BLOCK, max_tokens=3)
    assert client.beat().here == Load(1, 0), "all of it is cached, as far as is known"
    left.cancel()
    await until(lambda: client.beat().here == Load())


@scenario("one", "two", server=ServerConfig(max_queued_requests=1))
async def test_all_engines_together_set_the_limit(cluster):
    admission, one, two = cluster.front.admission, cluster.client("one"), cluster.client("two")
    tickets = [Ticket(admission) for _ in range(9)]
    with pytest.raises(ApiError, match="8 running and 1 queued"):
        Ticket(admission)
    assert one.beat().total == two.beat().total == Load(9, 0)
    for ticket in tickets:
        ticket.close()
    one.says(others_total=Load(5, 70))
    two.says(draining=True, others_total=Load(4, 70))
    cluster.members["two"] = engine_member("two", draining=True)
    await cluster.update()
    assert admission.others == Load(5, 70)
    with pytest.raises(ApiError, match="takes 4 running and 1 queued"):
        Ticket(admission)


@scenario("one", "two")
async def test_the_load_of_other_servers_counts_in_the_choice(cluster):
    cluster.client("one").says(others_here=Load(50, 0))
    tasks = [await cluster.start(str(i), first=100 * i) for i in range(10)]
    assert len(cluster.client("two").requests) == 10
    for _ in tasks:
        cluster.client("two").tick.release()
    await asyncio.gather(*tasks)


@scenario("one", "two", "three")
async def test_prompts_go_where_their_beginning_is(cluster):
    async def place(request_id, first):
        task = await cluster.start(request_id, tokens=4 * ROUTING_BLOCK, first=first)
        client = next(each for each in cluster.clients if request_id in each.requests)
        client.tick.release()
        await task
        return client.name

    places = [await place(f"{i}-{first}", 1000 * first) for first in range(6) for i in range(4)]
    assert all(len(set(places[i : i + 4])) == 1 for i in range(0, 24, 4))
    assert len(set(places)) > 1


@scenario("one", "two")
async def test_figures_of_all_servers_are_the_newest_that_any_engine_has(cluster):
    one, two = cluster.client("one"), cluster.client("two")
    one.peer_metrics = {"other": Snapshot(1, {"old": 1}), "gone": Snapshot(9, {"gone": 9})}
    two.peer_metrics = {"other": Snapshot(2, {"new": 2})}
    assert cluster.front.peer_metrics() == [{"gone": 9}, {"new": 2}]
    cluster.front.metrics.finished["stop"].inc()
    said = one.beat().metrics
    assert said == two.beat().metrics, "all relays hear the same"
    assert said["me"].figures == cluster.front.metrics.figures()
    assert said.keys() == {"me", "other", "gone"}, "so that a relay that is new knows of all servers"
    assert one.beat().metrics == {}, "once"
    cluster.front._next_snapshot = 0.0
    assert (one.beat().metrics["me"].number, one.beat().metrics) == (said["me"].number + 1, {})
    one.dead = "gone"
    await cluster.update()
    assert {"gone": 9} in cluster.front.peer_metrics(), "what only it knew"


def test_servers_hear_of_each_other_through_the_same_few_replicas():
    names = [f"r{i}" for i in range(2 * RELAYS)]

    @scenario(*names)
    async def body(cluster):
        def relays():
            return {each.name for each in cluster.clients if each.dead is None and each.beat().total is not None}

        other = Cluster(*reversed(cluster.members.values()))
        await other.update()
        assert relays() == set(names[:RELAYS])
        assert {each.name for each in other.clients if each.beat().total is not None} == relays()
        cluster.client("r5").says(others_total=Load(99, 0))
        cluster.client("r1").says(others_total=Load(7, 0))
        await cluster.update()
        assert cluster.front.admission.others == Load(7, 0), "of relays alone: others hear of nothing new"
        cluster.client("r0").dead = "gone"
        cluster.client("r1").says(draining=True)
        del cluster.members["r0"], cluster.members["r1"]
        await cluster.update()
        assert relays() == {"r2", "r3", "r4"}
        await other.front.close()

    body()


@scenario("one", "two")
async def test_what_a_replica_has_cached_outlives_the_connection_but_not_the_replica(cluster):
    async def where(request_id):
        task = await cluster.start(request_id, tokens=4 * ROUTING_BLOCK, max_tokens=1)
        client = next(each for each in cluster.clients if request_id in each.requests)
        load = client.beat().here
        client.tick.release()
        await task
        return client, load

    first, load = await where("a")
    assert load == Load(1, 4 * ROUTING_BLOCK)
    first.dead = "the connection broke"
    await cluster.update()
    again, load = await where("b")
    assert again is not first and again.name == first.name
    assert load == Load(1, 0)
    again.dead = "the engine died"
    del cluster.members[first.name]
    await cluster.update()
    cluster.members[first.name] = engine_member(first.name)
    await cluster.update()
    assert (await where("c"))[1] == Load(1, 4 * ROUTING_BLOCK)


@scenario("one", "two")
async def test_stats_of_engines_that_answer(cluster):
    one, two = cluster.client("one"), cluster.client("two")
    one.soon = {"stats": EngineStats(num_running=1)}
    two.soon = {"stats": EngineStats(num_running=2)}
    assert {label: stats.num_running for label, stats in (await cluster.front.stats()).items()} == {"0": 1, "1": 2}
    cluster.members["two"] = engine_member("two", index=0)  # for a moment, during an update
    await cluster.update()
    assert {label: stats.num_running for label, stats in (await cluster.front.stats()).items()} == {"0": 1, "two": 2}
    one.dead = "gone"
    assert set(await cluster.front.stats()) == {"0"}


@scenario("one", "two")
async def test_the_smallest_context_is_what_counts(cluster):
    """During an update replicas of two configs run."""
    cluster.info = msgspec.structs.replace(INFO, max_model_len=32)
    cluster.members["three"] = engine_member("three")
    await cluster.update()
    assert cluster.front.info.max_model_len == 32
    cluster.client("three").says(draining=True)
    assert cluster.front.info.max_model_len == 1000


@scenario("one")
async def test_an_engine_that_never_answers_holds_up_nobody(cluster):
    cluster.mute.add("slow")
    cluster.members = {name: engine_member(name) for name in ("slow", "one", "two")}
    await cluster.update()
    assert cluster.front.num_replicas == 2
    assert [each.name for each in cluster.clients] == ["one", "slow", "two"], "it is asked once"


@scenario()
async def test_an_engine_of_another_version_of_rayllm_is_left_alone(cluster):
    cluster.members["one"] = engine_member("one", version=VERSION - 1)
    await cluster.update()
    assert not cluster.clients
    with pytest.raises(EngineDeadError, match="the engine is of another version of rayllm than this API server"):
        cluster.front.engine()
    cluster.members["two"] = engine_member("two")
    await cluster.update()
    assert cluster.front.num_replicas == 1 and cluster.client("two")


@scenario("one", "two")
async def test_a_request_with_a_key_waits_for_a_successor_if_both_engines_die(cluster):
    """Both are on a host that dies: connections to them end one after the other."""
    sent = msgspec.structs.replace(request("r"), key=IdempotencyKey("k", b"f", 1))
    task = asyncio.create_task(consume(cluster.front.generate(sent)))
    await until(lambda: any(each.requests for each in cluster.clients))
    (lost,) = [each for each in cluster.clients if each.requests]
    (other,) = [each for each in cluster.clients if each is not lost]

    async def knows(_key_id):  # as EngineClient: it waits for the answer, and says False when the engine dies
        await until(lambda: other.dead is not None)
        return False

    other.knows = knows
    lost.dead = "gone"
    lost.tick.release()
    await asyncio.sleep(0.1)
    other.dead = "gone too"
    await asyncio.sleep(0.1)
    assert not task.done()
    cluster.members = {"three": engine_member("three")}
    await cluster.update()
    await until(lambda: cluster.client("three").requests)
    cluster.client("three").tick.release()
    await task
