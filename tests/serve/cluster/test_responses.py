"""An API server that runs a response in the background is killed: another one takes it over, from a real engine."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import httpx
import msgspec
from fastapi import FastAPI
from support.live_engines import LiveEngine, connected

from rayllm import timeouts
from rayllm.serve.cluster.front import ModelFront
from rayllm.serve.http.app import create_app
from rayllm.serve.http.jobs import Jobs
from rayllm.serve.http.responses.store import ResponseStore

BODY = {
    "input": "What is the for statement?",
    "max_output_tokens": 300,
    "temperature": 1.0,
    "ignore_eos": True,
    "background": True,
    "stream": True,
}
SERVER = """
import asyncio, sys
from pathlib import Path
import msgspec, uvicorn
from support.live_engines import connected_to
from test_responses import app_of
from rayllm.serve.cluster.directory import EngineMember

async def main():
    front = await connected_to(msgspec.json.decode(sys.argv[1], type=list[EngineMember]), "killed")
    app = app_of(front, Path(sys.argv[2]))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    print(server.servers[0].sockets[0].getsockname()[1], flush=True)
    await serving

asyncio.run(main())
"""


def app_of(front: ModelFront, folder: Path) -> FastAPI:
    """What an API server serves."""
    store, jobs = ResponseStore(folder), Jobs()
    return create_app(SimpleNamespace(models={"m": front}, door=front.admission, response_store=store, jobs=jobs))


async def served_elsewhere(engine: LiveEngine, folder: Path) -> tuple[subprocess.Popen[str], str]:
    """(the process of an API server of its own, its URL)"""
    member = msgspec.json.encode([engine.member]).decode()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])}
    command = [sys.executable, "-c", SERVER, member, str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    return process, f"http://127.0.0.1:{(await asyncio.to_thread(process.stdout.readline)).strip()}"


async def read(response: httpx.Response, count: int = 10**9) -> list[dict]:
    """So many of the events of a stream."""
    events: list[dict] = []
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            events.append(json.loads(line[6:]))
        if len(events) == count:
            break
    return events


def test_a_stream_goes_on_where_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(timeouts, "RESPONSE_SILENCE_S", 1.5)

    async def scenario():
        engine = LiveEngine("one")
        process, url = await served_elsewhere(engine, tmp_path)
        front = await connected([engine], "other")
        try:
            async with (
                httpx.AsyncClient(base_url=url, timeout=60) as client,
                client.stream("POST", "/v1/responses", json=BODY) as response,
            ):
                begun = await read(response, 12)
                process.kill()
            path = f"/v1/responses/{begun[0]['response']['id']}"
            transport = httpx.ASGITransport(app_of(front, tmp_path))
            async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
                first = begun[-1]["sequence_number"]
                rest = await client.get(f"{path}?stream=true&starting_after={first}")
                events = begun + await read(rest)
                assert [event["sequence_number"] for event in events] == list(range(len(events)))
                response = (await client.get(path)).json()
            assert events[-1]["type"] == "response.incomplete" and events[-1]["response"] == response
            assert response["usage"]["output_tokens"] == 300
            text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
            assert text == response["output"][0]["content"][0]["text"]
            assert engine.driver.stats.generation_tokens == 300, "computed once"
        finally:
            process.kill()
            process.wait()
            await front.close()
            engine.close()

    asyncio.run(asyncio.wait_for(scenario(), 90))


def test_a_cancelled_one_ends_in_the_engine(tmp_path):
    async def scenario():
        engine = LiveEngine("one")
        front = await connected([engine], "me")
        try:
            transport = httpx.ASGITransport(app_of(front, tmp_path))
            async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
                made = (await client.post("/v1/responses", json=BODY | {"stream": False})).json()
                while not engine.driver.busy:
                    await asyncio.sleep(0.01)
                answer = (await client.post(f"/v1/responses/{made['id']}/cancel")).json()
                assert answer["status"] == "cancelled"
                async with asyncio.timeout(20):  # not after the minute that engines keep requests with keys
                    while engine.driver.busy or engine.driver.num_orphans:
                        await asyncio.sleep(0.05)
                assert engine.driver.stats.generation_tokens < 300
        finally:
            await front.close()
            engine.close()

    asyncio.run(asyncio.wait_for(scenario(), 60))
