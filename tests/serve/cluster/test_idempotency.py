"""API servers die, and engines: a request repeated with its Idempotency-Key has the same answer from its beginning."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from types import SimpleNamespace

import httpx
import msgspec
import pytest
from fastapi import FastAPI
from support.driver import until, whole
from support.live_engines import LiveEngine, connected, outputs_of_every_kind
from support.request_kinds import requests_of_every_kind
from support.serve import KEYS

from rayllm.api.types import IdempotencyKey, RequestOutput
from rayllm.config.options import ServerConfig
from rayllm.serve.cluster.front import ModelFront
from rayllm.serve.http.app import create_app

PROMPT = "The for statement is used to iterate over the elements"
BODY = {
    "prompt": PROMPT,
    "n": 2,
    "logprobs": 2,
    "max_tokens": 150,
    "temperature": 1.0,
    "ignore_eos": True,
    "stream": True,
}
HEADER = {"Idempotency-Key": "8e03978e-40d5-43e8-bc93-6894a57f9324"}
SERVER = """
import asyncio, json, sys
import msgspec, uvicorn
from support.live_engines import connected_to
from test_idempotency import app_of
from rayllm.serve.cluster.directory import EngineMember

async def main():
    front = await connected_to(msgspec.json.decode(sys.argv[1], type=list[EngineMember]), "killed")
    server = uvicorn.Server(uvicorn.Config(app_of(front), port=0, log_level="error", lifespan="off"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    print(server.servers[0].sockets[0].getsockname()[1], flush=True)
    await serving

asyncio.run(main())
"""


def app_of(front: ModelFront) -> FastAPI:
    """What an API server serves."""
    return create_app(SimpleNamespace(models={"m": front}, door=front.admission), ServerConfig())


async def served_elsewhere(engines: list[LiveEngine]) -> tuple[subprocess.Popen[str], str]:
    """(the process of an API server of its own, its URL)"""
    members = msgspec.json.encode([engine.member for engine in engines])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])}
    command = [sys.executable, "-c", SERVER, members.decode()]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    return process, f"http://127.0.0.1:{(await asyncio.to_thread(process.stdout.readline)).strip()}"


def local(front: ModelFront) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app_of(front)), base_url="http://test", timeout=60)


async def chunks(response: httpx.Response) -> AsyncIterator[dict]:
    async for line in response.aiter_lines():
        if line.startswith("data: {"):
            yield json.loads(line[6:])


def joined(parts: list[dict]) -> dict:
    """What all chunks of a stream say together."""
    heads = {(part["id"], part["created"], part["model"]) for part in parts}
    total: dict = {"head": heads, "usage": [part["usage"] for part in parts if part.get("usage")]}
    for choice in (choice for part in parts for choice in part["choices"]):
        for name, value in {"text": choice["text"], **choice["logprobs"]}.items():
            place = choice["index"], name
            total[place] = total[place] + value if place in total else value
        total[choice["index"], "end"] = choice["finish_reason"]
    return total


async def answer_to(client: httpx.AsyncClient) -> dict:
    """What the whole stream says."""
    async with client.stream("POST", "/v1/completions", json=BODY, headers=HEADER) as response:
        assert response.status_code == 200, await response.aread()
        return joined([part async for part in chunks(response)])


def test_an_api_server_is_killed_and_another_one_answers_from_the_beginning():
    async def scenario():
        engines = [LiveEngine("one"), LiveEngine("two")]
        process, url = await served_elsewhere(engines)
        front = await connected(engines, "other")
        try:
            async with (
                httpx.AsyncClient(base_url=url, timeout=60) as client,
                client.stream("POST", "/v1/completions", json=BODY, headers=HEADER) as response,
            ):
                parts = chunks(response)
                begun = joined([await anext(parts) for _ in range(8)])
                process.kill()
            async with local(front) as client:
                answer = await answer_to(client)
                assert answer == await answer_to(client), "and once more when it has ended"
                for place, said in begun.items():
                    if place == "head":
                        assert answer[place] == said
                    elif place != "usage" and place[1] != "end":
                        assert answer[place][: len(said)] == said, place
                assert [answer[index, "end"] for index in range(2)] == ["length"] * 2
                assert [len(answer[index, "tokens"]) for index in range(2)] == [150, 150]
                another = await client.post("/v1/completions", json=BODY | {"n": 1}, headers=HEADER)
                assert (another.status_code, another.json()["error"]["code"]) == (422, "idempotency_key_reused")
            num_prompt_tokens = len(front.tokenizer.encode(PROMPT))
            assert sum(engine.driver.stats.prompt_tokens for engine in engines) == num_prompt_tokens, "computed once"
            assert sum(engine.driver.stats.generation_tokens for engine in engines) == 300
        finally:
            process.kill()
            process.wait()
            await front.close()
            for engine in engines:
                engine.close()

    asyncio.run(asyncio.wait_for(scenario(), 90))


async def all_kinds(front: ModelFront, name: str, progress: list[int]) -> list[RequestOutput]:
    """As `outputs_of_every_kind`, with keys."""

    def with_key(request):
        key = IdempotencyKey(request.request_id, b"", 1)
        return msgspec.structs.replace(request, request_id=f"{name}-{request.request_id}", key=key)

    return await outputs_of_every_kind(front, progress, with_key)


@pytest.mark.parametrize("drains", [False, True], ids=["it dies", "it was to end"])
def test_requests_of_every_kind_are_kept_through_the_end_of_an_engine(drains):
    """Two servers listen to them, one from the middle on; a third one comes when all is over."""

    async def scenario():
        lost, other = LiveEngine("one"), LiveEngine("two")
        calm = await connected([other])
        undisturbed = [await whole(calm.generate(each)) for each in requests_of_every_kind(calm.tokenizer)]
        fronts = [await connected([lost], name) for name in ("first", "second")]
        progress = [[0], [0]]
        tasks = [asyncio.create_task(all_kinds(fronts[0], "first", progress[0]))]
        await until(lambda: progress[0][0] > 40)
        tasks.append(asyncio.create_task(all_kinds(fronts[1], "second", progress[1])))
        await until(lambda: progress[1][0] > 20)
        if drains:
            await asyncio.to_thread(lost.drain)
        await asyncio.to_thread(lost.close)
        for front in fronts:
            await front.update([other.member], KEYS)
        told = await asyncio.wait_for(asyncio.gather(*tasks), 60)
        gone = [each for each in requests_of_every_kind(calm.tokenizer) if not other.driver.knows(each.request_id)]
        assert len(gone) < 5, "those that had ended when their engine died; the others moved with all that came before"
        before = other.driver.stats.prompt_tokens
        told.append(await all_kinds(calm, "third", [0]))
        computed = other.driver.stats.prompt_tokens - before
        assert computed == sum(len(each.prompt_token_ids) for each in gone), "the third got what there was"
        for outputs in told:
            for expected, output in zip(undisturbed, outputs, strict=True):
                assert output.outputs == expected.outputs, output.request_id
                assert output.prompt_logprobs == expected.prompt_logprobs, output.request_id
                assert output.embedding == expected.embedding
                assert output.created == 1
        assert other.driver.stats.num_used_blocks == 0
        for front in (calm, *fronts):
            await front.close()
        other.close()

    asyncio.run(asyncio.wait_for(scenario(), 90))
