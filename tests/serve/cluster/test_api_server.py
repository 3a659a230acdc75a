"""An API server that listens itself, in front of a replica whose core makes up tokens. No Ray."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile

import httpx
import msgspec
import pytest
from support.driver import FakeCore, until
from support.serve import LocalDirectory, engine_member, place

from rayllm import timeouts
from rayllm.api.wire import VERSION
from rayllm.config.options import ServerConfig
from rayllm.engine.client import EngineClient
from rayllm.errors import ConfigError, EngineDeadError
from rayllm.serve.cluster.api_server import ApiServer, FrontOptions
from rayllm.serve.cluster.directory import ServerMember
from rayllm.serve.cluster.front import FrontModel
from rayllm.serve.cluster.replica import EngineReplica
from rayllm.serve.http.responses.store import StoredResponse

PROMPT = {"prompt": [1, 2, 3], "max_tokens": 3, "stream": True}


async def make(kind, *args, **fields):
    """What Serve does with a class whose constructor is a coroutine."""
    made = kind.__new__(kind)
    await made.__init__(*args, **fields)
    return made


def options(ingress_node="here"):
    server = ServerConfig(drain_timeout=20, api_server_drain_timeout=20)
    model = FrontModel(name="m", folder="", server=server, skip_tokenizer_init=True)
    return FrontOptions(models=[model], server=server, ingress_node=ingress_node)


class Cluster:
    """A directory, one engine on the node "here", and an API server on a node."""

    def __init__(self):
        self.core, self.directory = FakeCore(gated=True), LocalDirectory()

    async def start_engine(self):
        start = lambda _config: self.core  # noqa: E731
        self.engine = await make(EngineReplica, None, "m", 20.0, "none", start, place("engine"), self.directory)

    async def start_server(self):
        self.server = await make(ApiServer, options(), place=place("api"), registry=self.directory)

    def servers(self):
        return self.directory.ask().servers

    def client(self):
        return httpx.AsyncClient(base_url=f"http://{self.servers()[0].address}", timeout=20)


def scenario(test):
    def run():
        async def body():
            cluster = Cluster()
            await cluster.start_engine()
            await cluster.start_server()
            try:
                await asyncio.wait_for(test(cluster), 30)
            finally:
                cluster.core.allow(1000)
                cluster.directory.stop(0)
                await asyncio.wait_for(cluster.server.__del__(), 10)
                await asyncio.wait_for(cluster.engine.__del__(), 10)
            assert not cluster.servers()

        asyncio.run(body())

    run.__name__ = test.__name__
    return run


@scenario
async def test_it_listens_where_the_directory_says(cluster):
    (member,) = cluster.servers()
    assert (member.node_id, member.draining) == ("here", False)
    assert member.address.startswith("127.0.0.1:")
    await cluster.server.check_health()
    cluster.core.allow(3)
    async with cluster.client() as client:
        answer = (await client.post("/v1/completions", json=PROMPT | {"stream": False})).json()
    assert answer["usage"]["completion_tokens"] == 3


@scenario
async def test_streams_end_before_it_does(cluster):
    cluster.core.allow(1)  # an answer begins with the first token
    async with cluster.client() as client, client.stream("POST", "/v1/completions", json=PROMPT) as response:
        stopping = asyncio.create_task(cluster.server.__del__())
        await until(lambda: cluster.servers()[0].draining, 5)
        await asyncio.sleep(0.3)
        assert not stopping.done()
        cluster.core.allow(2)
        lines = [line async for line in response.aiter_lines() if line]
        assert lines[-1] == "data: [DONE]"
    await asyncio.wait_for(stopping, 10)
    assert not cluster.servers()
    with pytest.raises(EngineDeadError, match="HTTP server has stopped"):
        await cluster.server.check_health()


@scenario
async def test_what_does_not_end_in_time_is_aborted(cluster):
    cluster.core.allow(1)  # an answer begins with the first token
    async with cluster.client() as client, client.stream("POST", "/v1/completions", json=PROMPT) as response:
        stopping = asyncio.create_task(cluster.server.__del__())
        await until(lambda: cluster.servers()[0].draining)
        cluster.directory.stop(0.5)  # what `rayllm launch` does; it can only shorten the time
        await asyncio.wait_for(stopping, 10)
        with contextlib.suppress(httpx.HTTPError):
            assert b"[DONE]" not in await response.aread()


@scenario
async def test_who_comes_while_all_ends_hears_why(cluster):
    cluster.core.allow(1)
    async with cluster.client() as client, client.stream("POST", "/v1/completions", json=PROMPT) as response:
        cluster.directory.stop(20)
        await until(lambda: cluster.directory.ask().engines[0].draining)
        await asyncio.sleep(1)  # for the engine's beat
        refused = await client.post("/v1/completions", json=PROMPT)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
        assert "the server is shutting down" in refused.json()["error"]["message"]
        cluster.core.allow(2)
        assert b"[DONE]" in await response.aread()
    await until(lambda: not cluster.servers())


def test_on_a_host_that_goes_it_serves_until_there_is_another():
    async def body():
        cluster = Cluster()
        await cluster.start_engine()
        server = await make(ApiServer, options(), place=place("api", leaves_in=60), registry=cluster.directory)
        stopping = asyncio.create_task(server.__del__())
        await asyncio.sleep(3 * timeouts.REGISTER_S)
        assert not cluster.servers()[0].draining
        cluster.core.allow(3)
        async with cluster.client() as client:
            assert (await client.post("/v1/completions", json=PROMPT)).status_code == 200
        cluster.directory.ask(ServerMember("starts", "there", ["m"]))
        cluster.directory.ask(ServerMember("another", "there", ["m"], "127.0.0.2:80"))
        await until(lambda: any(each.draining for each in cluster.servers()))
        await asyncio.wait_for(stopping, 10)
        cluster.directory.stop(0)
        await cluster.engine.__del__()

    asyncio.run(body())


def test_it_waits_for_an_engine_of_every_model():
    async def body():
        cluster = Cluster()
        starting = asyncio.create_task(cluster.start_server())
        await asyncio.sleep(0.3)
        assert not starting.done()
        assert [member.address for member in cluster.servers()] == [""], "no ingress shall pass requests on to it"
        await cluster.start_engine()
        await asyncio.wait_for(starting, 10)
        assert cluster.servers()[0].address
        cluster.directory.stop(0)
        await cluster.server.__del__()
        await cluster.engine.__del__()

    asyncio.run(body())


@pytest.mark.parametrize(("ingress_node", "host"), [("here", "127.0.0.1"), ("elsewhere", "127.0.0.8")])
def test_only_the_node_of_the_ingress_is_reached_by_loopback(ingress_node, host):
    async def body():
        cluster = Cluster()
        await cluster.start_engine()
        where = place("api")._replace(host="127.0.0.8")  # stands for the node's address in the cluster
        server = await make(ApiServer, options(ingress_node), place=where, registry=cluster.directory)
        assert cluster.servers()[0].address.startswith(f"{host}:")
        cluster.directory.stop(0)
        await server.__del__()
        await cluster.engine.__del__()

    asyncio.run(body())


@scenario
async def test_one_whose_engines_were_replaced_by_another_version_drains(cluster):
    assert not cluster.servers()[0].draining
    cluster.directory.ask(engine_member("new", version=VERSION + 1))
    await asyncio.sleep(2 * timeouts.REGISTER_S)
    assert not cluster.servers()[0].draining, "it still has its own"
    ending = asyncio.create_task(cluster.engine.__del__())
    await until(
        lambda: cluster.directory.ask(engine_member("new", version=VERSION + 1)) and cluster.servers()[0].draining
    )
    cluster.directory.leave("new")
    await ending


def test_api_servers_of_a_host_share_a_folder_of_responses(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    async def run():
        cluster = Cluster()
        await cluster.start_engine()
        first, second = [
            await make(ApiServer, options(), place=place(name), registry=cluster.directory) for name in "ab"
        ]
        stores = [server._models.response_store for server in (first, second)]
        stores[0].write(StoredResponse("", {"id": f"resp_{'a' * 32}", "status": "completed"}, []))
        assert stores[1].read(f"resp_{'a' * 32}", "") is not None
        folders = [path for path in tmp_path.iterdir() if len(path.name) > 40]
        assert len(folders) == 1
        await first.__del__()
        assert folders[0].exists()
        await second.__del__()
        assert not folders[0].exists()
        await cluster.engine.__del__()

    asyncio.run(run())


def test_responses_in_a_folder_that_was_named(tmp_path):
    async def run():
        cluster = Cluster()
        await cluster.start_engine()
        folder = tmp_path / "deep" / "state"
        named = msgspec.structs.replace(options(), server=ServerConfig(drain_timeout=20, state_dir=str(folder)))
        server = await make(ApiServer, named, place=place("a"), registry=cluster.directory)
        server._models.response_store.write(StoredResponse("", {"id": f"resp_{'a' * 32}", "status": "completed"}, []))
        await server.__del__()
        assert (folder / "responses" / f"resp_{'a' * 32}.json").exists(), "it stays when the server ends"
        (tmp_path / "file").touch()
        bad = msgspec.structs.replace(options(), server=ServerConfig(state_dir=str(tmp_path / "file")))
        with pytest.raises(ConfigError, match=r"state_dir .*: File exists"):
            await make(ApiServer, bad, place=place("b"), registry=cluster.directory)
        await cluster.engine.__del__()

    asyncio.run(run())


@scenario
async def test_a_server_listens_once_all_engines_have_answered(cluster):
    """Else the only one that it has reached may drain, and it would refuse what others could answer."""
    connect, calls, core = EngineClient.connect, [], FakeCore()
    other = place("engine2")
    engine = await make(EngineReplica, None, "m", 20.0, "none", lambda _config: core, other, cluster.directory)

    async def slowly(self):
        calls.append(self)
        await asyncio.sleep(0.5 * (len(calls) == 2))
        await connect(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineClient, "connect", slowly)
        server = await make(ApiServer, options(), place=place("api2"), registry=cluster.directory)
    assert len(calls) == 2
    assert server._models.models["m"].num_replicas == 2
    cluster.directory.stop(0)
    for each in (server, engine):
        await asyncio.wait_for(each.__del__(), 10)
