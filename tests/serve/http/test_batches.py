"""/v1/files and /v1/batches: objects as OpenAI's client has them, owners, limits, batches to their end.

And take-overs: of two servers with one folder one ends, or stands still and wakes up at the worst moment.
"""

import asyncio
import hashlib
import json
import time
from contextlib import asynccontextmanager

import httpx
import pytest
from openai.types import Batch, FileObject
from support.app import FakeState, error_of

from rayllm import timeouts
from rayllm.config.options import ServerConfig
from rayllm.serve.http.app import create_app
from rayllm.serve.http.auth import ApiKey, load_api_keys
from rayllm.serve.http.batches import worker as worker_module
from rayllm.serve.http.batches.files import FileLimits
from rayllm.serve.http.batches.store import BatchStore
from rayllm.serve.http.batches.worker import BatchWorker

URL = "/v1/completions"


def line(custom_id, prompt="hi", url=URL, **body):
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": {"prompt": prompt} | body})


class Server:
    """An API server over a store, with calls of a client."""

    def __init__(self, folder, limits=FileLimits(), keys=(), clock=time.time, monotonic=time.monotonic):
        self.state = FakeState()
        self.store = BatchStore(folder, limits, clock, monotonic)
        self.app = create_app(self.state, None, keys, batches=lambda: self.store)
        self.worker = BatchWorker(self.state, self.app, self.store)

    async def call(self, method, path, key=None, **options):
        headers = {"authorization": f"Bearer {key}"} if key else {}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=self.app), base_url="http://test") as client:
            return await client.request(method, path, headers=headers, **options)

    def upload(self, text, key=None, name="in.jsonl", **form):
        form = {"purpose": "batch"} | form
        return self.call("POST", "/v1/files", key, data=form, files={"file": (name, text)})

    async def file_id(self, text, key=None):
        return (await self.upload(text, key)).json()["id"]

    def create(self, file_id, key=None, **fields):
        body = {"input_file_id": file_id, "endpoint": URL, "completion_window": "24h"} | fields
        return self.call("POST", "/v1/batches", key, json=body)

    async def batch_id(self, text, key=None):
        return (await self.create(await self.file_id(text, key), key)).json()["id"]

    async def get(self, batch_id, key=None):
        return Batch.model_validate((await self.call("GET", f"/v1/batches/{batch_id}", key)).json(), strict=True)

    async def until(self, batch_id, *statuses, key=None):
        while True:
            batch = await self.get(batch_id, key)
            if batch.status in statuses:
                return batch
            await asyncio.sleep(0.005)

    async def results(self, file_id, key=None):
        """custom_id -> the result, of a file with results."""
        text = (await self.call("GET", f"/v1/files/{file_id}/content", key)).text
        found = [json.loads(each) for each in text.splitlines()]
        assert len({each["custom_id"] for each in found}) == len(found)
        return {each["custom_id"]: each for each in found}

    @asynccontextmanager
    async def working(self):
        task = asyncio.create_task(self.worker.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(worker_module, "LOOK_S", 0.01)
    monkeypatch.setattr(worker_module, "PLACE_S", 0.001)


@pytest.fixture
def server(tmp_path):
    return Server(tmp_path)


# ---- files


def test_a_file_is_kept_listed_read_and_deleted(server):
    async def check():
        first = FileObject.model_validate((await server.upload(b"one")).json(), strict=True)
        second = (await server.upload(b"two!", name="b.jsonl")).json()
        assert (first.bytes, first.filename, first.purpose, first.status) == (3, "in.jsonl", "batch", "processed")
        assert (await server.call("GET", f"/v1/files/{first.id}")).json() == first.model_dump(exclude_none=True)
        assert (await server.call("GET", f"/v1/files/{first.id}/content")).content == b"one"
        listed = (await server.call("GET", "/v1/files")).json()["data"]
        assert {each["id"] for each in listed} == {first.id, second["id"]}
        gone = await server.call("DELETE", f"/v1/files/{first.id}")
        assert gone.json() == {"id": first.id, "object": "file", "deleted": True}
        for path in (f"/v1/files/{first.id}", f"/v1/files/{first.id}/content"):
            assert error_of(await server.call("GET", path), 404)["code"] == "file_not_found"

    asyncio.run(check())


def test_files_come_in_pages(server):
    async def check():
        ids = [await server.file_id(b"x") for _ in range(5)]
        found, after = [], None
        while True:
            query = {"limit": 2, "order": "asc"} | ({"after": after} if after else {})
            page = (await server.call("GET", "/v1/files", params=query)).json()
            found += [each["id"] for each in page["data"]]
            after = page["last_id"]
            if not page["has_more"]:
                break
        assert sorted(found) == sorted(ids) and len(found) == 5
        assert error_of(await server.call("GET", "/v1/files?after=file-x"), 400)["param"] == "after"
        assert (await server.call("GET", "/v1/files?purpose=batch_output")).json()["data"] == []
        assert (await server.call("GET", "/v1/files?limit=0")).status_code == 400

    asyncio.run(check())


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"purpose": "assistants"}, "purpose"),
        ({"expires_after[anchor]": "created_at", "expires_after[seconds]": "1"}, "expires_after"),
        ({"expires_after[anchor]": "last_used", "expires_after[seconds]": "3600"}, "expires_after"),
    ],
)
def test_a_bad_upload_is_refused(server, form, param):
    assert error_of(asyncio.run(server.upload(b"x", **form)), 400)["param"] == param


def test_an_upload_without_a_file_is_refused(server):
    form = {"purpose": (None, "batch"), "file": (None, "text")}
    assert error_of(asyncio.run(server.call("POST", "/v1/files", files=form)), 400)["param"] == "file"
    assert asyncio.run(server.call("POST", "/v1/files", content=b"x")).status_code == 400


def test_files_have_limits(tmp_path):
    server = Server(tmp_path, FileLimits(file_bytes=100_000, total_bytes=150_000))

    async def check():
        for size in (100_001, 200_000):  # the second is refused before it is read as a whole
            assert error_of(await server.upload(b"x" * size), 413)["code"] == "file_too_large"
        kept = await server.file_id(b"x" * 100_000)
        assert error_of(await server.upload(b"x" * 60_000), 413)["code"] == "storage_full"
        await server.call("DELETE", f"/v1/files/{kept}")
        assert (await server.upload(b"x" * 60_000)).status_code == 200

    asyncio.run(check())


def test_files_expire(tmp_path):
    now = [1000.0]
    server = Server(tmp_path, FileLimits(ttl=7200), clock=lambda: now[0])

    async def check():
        soon = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
        long, short = await server.file_id(b"x"), (await server.upload(b"x", **soon)).json()
        assert short["expires_at"] == 4600
        now[0] += 3601
        assert (await server.call("GET", f"/v1/files/{short['id']}")).status_code == 404
        assert (await server.call("GET", f"/v1/files/{long}")).status_code == 200
        server.store.sweep()
        assert {path.stem for path in tmp_path.glob("files/*")} == {long}

    asyncio.run(check())


@pytest.mark.parametrize("path", ["/v1/files/..%2F..%2Fsecret", "/v1/files/file-x/content", "/v1/batches/..%2Fx"])
def test_ids_are_no_paths(server, path):
    assert error_of(asyncio.run(server.call("GET", path)), 404)


# ---- batches


def test_a_batch_is_answered(server):
    text = "\n".join([line("a", max_tokens=2), line("b", prompt=""), line("c", url="/v1/embeddings"), "bad"])

    async def check():
        file_id = await server.file_id(text)
        made = (await server.create(file_id, metadata={"for": "test"})).json()
        assert Batch.model_validate(made, strict=True).status == "validating"
        async with server.working():
            batch = await server.until(made["id"], "completed")
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (4, 1, 3)
        assert batch.metadata == {"for": "test"} and batch.input_file_id == file_id
        assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
        good, bad = await server.results(batch.output_file_id), await server.results(batch.error_file_id)
        assert good["a"]["response"]["body"]["choices"][0]["text"] == "ab"
        assert bad["b"]["response"]["status_code"] == 400
        assert bad["c"]["error"]["code"] == "invalid_url" and bad[None]["error"]["code"] == "invalid_json"
        file = (await server.call("GET", f"/v1/files/{batch.output_file_id}")).json()
        assert file["purpose"] == "batch_output"
        listed = (await server.call("GET", "/v1/batches")).json()
        assert [each["id"] for each in listed["data"]] == [batch.id] and not listed["has_more"]
        assert error_of(await server.call("POST", f"/v1/batches/{batch.id}/cancel"), 409)["code"] == "batch_ended"

    asyncio.run(check())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/models"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, "output_expires_after"),
    ],
)
def test_a_bad_batch_is_refused(server, fields, param):
    async def check():
        return await server.create(await server.file_id("x"), **fields)

    assert error_of(asyncio.run(check()), 400)["param"] == param


def test_a_batch_needs_its_file(server):
    async def check():
        assert error_of(await server.create("file-" + "0" * 32), 404)["code"] == "file_not_found"
        empty = await server.batch_id("\n\n")
        missing = await server.batch_id(line("a"))
        for file in (await server.call("GET", "/v1/files")).json()["data"]:
            if file["bytes"] > 2:
                await server.call("DELETE", f"/v1/files/{file['id']}")
        async with server.working():
            assert (await server.until(empty, "failed")).errors.data[0].code == "empty_file"
            assert (await server.until(missing, "failed")).errors.data[0].code == "file_not_found"

    asyncio.run(check())


def test_a_cancelled_batch_keeps_what_is_answered(server):
    text = "\n".join([line("a"), line("never", prompt="slow"), *(line(str(n), prompt="slow") for n in range(20))])

    async def check():
        batch_id = await server.batch_id(text)
        async with server.working():
            while (await server.get(batch_id)).request_counts.completed < 1:
                await asyncio.sleep(0.005)
            assert (await server.call("POST", f"/v1/batches/{batch_id}/cancel")).json()["status"] == "cancelling"
            batch = await server.until(batch_id, "cancelled")
        assert list(await server.results(batch.output_file_id)) == ["a"]
        others = await server.results(batch.error_file_id)
        assert len(others) == 21 and {each["error"]["code"] for each in others.values()} == {"batch_cancelled"}
        assert batch.request_counts.total == 22 and batch.cancelling_at and batch.cancelled_at

    asyncio.run(check())


def test_a_batch_expires(tmp_path):
    now = [1000.0]
    server = Server(tmp_path, clock=lambda: now[0])

    async def check():
        batch_id = await server.batch_id(line("a", prompt="slow"))
        async with server.working():
            await server.until(batch_id, "in_progress")
            now[0] += 24 * 3600
            batch = await server.until(batch_id, "expired")
        assert batch.expired_at == now[0]
        assert (await server.results(batch.error_file_id))["a"]["error"]["code"] == "batch_expired"

    asyncio.run(check())


def test_another_server_goes_on_with_a_batch(tmp_path):
    """The first server ends in the middle; requests that it has answered are not asked again."""
    first, second = Server(tmp_path), Server(tmp_path)
    text = "\n".join([*(line(str(n)) for n in range(20)), *(line(f"slow-{n}", prompt="slow") for n in range(3))])

    async def check():
        batch_id = await first.batch_id(text)
        async with first.working():
            while (await first.get(batch_id)).request_counts.completed < 20:
                await asyncio.sleep(0.005)
            async with second.working():  # it keeps off as long as the first one works
                await asyncio.sleep(0.05)
                assert not second.state.fake.started
        async with second.working():
            await second.until(batch_id, "in_progress")
            while len(second.state.fake.started) < 3:
                await asyncio.sleep(0.005)
            await second.call("POST", f"/v1/batches/{batch_id}/cancel")
            batch = await second.until(batch_id, "cancelled")
        assert len(second.state.fake.started) == 3
        assert len(await second.results(batch.output_file_id)) == 20

    asyncio.run(check())


def test_a_server_that_stood_still_does_not_write_results_too(tmp_path):
    """Its requests are answered when another one has ended the batch. Until then it hears and says nothing."""
    now, let_go = [0.0], []
    first, second = Server(tmp_path), Server(tmp_path, monotonic=lambda: now[0])
    texts = [line(str(n)) for n in range(5)]

    async def check():
        awake, stands = asyncio.Event(), asyncio.Event()

        async def slow_app(scope, receive, send):
            stands.set()
            await awake.wait()
            await first.app(scope, receive, send)

        first.worker = BatchWorker(first.state, slow_app, first.store)
        first.store.beat = lambda _stored: True
        first.store.save = lambda _stored: None
        first.store.release = let_go.append
        batch_id = await second.batch_id("\n".join(texts))
        async with first.working():
            await stands.wait()
            async with second.working():
                await second.get(batch_id)
                await asyncio.sleep(0.05)
                assert not second.state.fake.started
                while (ended := await second.get(batch_id)).status != "completed":
                    now[0] += 1
                    await asyncio.sleep(0.005)
                assert now[0] > timeouts.BATCH_SILENCE_S
                awake.set()
                while not let_go:
                    await asyncio.sleep(0.005)
                assert len(first.state.fake.started) == len(texts)
                assert await second.get(batch_id) == ended
        assert len(await second.results(ended.output_file_id)) == len(texts) == len(second.state.fake.started)
        outputs = (await second.call("GET", "/v1/files?purpose=batch_output")).json()["data"]
        assert [each["id"] for each in outputs] == [ended.output_file_id]

    asyncio.run(check())


def test_every_batch_has_its_turn(server, monkeypatch):
    """Of two batches one at a time is worked on. They take turns, and nothing is asked twice."""
    monkeypatch.setattr(worker_module, "MAX_BATCHES", 1)
    monkeypatch.setattr(worker_module, "TURN_S", 0.0)

    terms, end = [], server.store.end

    def watched_end(stored):
        terms.append(stored.term)
        return end(stored)

    async def check():
        ids = [await server.batch_id("\n".join(line(f"{name}{n}") for n in range(40))) for name in "ab"]
        async with server.working():
            for batch_id in ids:
                assert (await server.until(batch_id, "completed")).request_counts.completed == 40
        assert len(terms) == 2 and max(terms) >= 2
        assert len(server.state.fake.started) == 80

    monkeypatch.setattr(server.store, "end", watched_end)
    asyncio.run(check())


def test_batches_that_others_work_on_or_that_fail_keep_no_other_one_waiting(tmp_path, monkeypatch):
    first, second = Server(tmp_path), Server(tmp_path)
    take = second.store.take

    async def check():
        ids = [await first.batch_id(line("a", prompt="slow")) for _ in range(4)]
        async with first.working():
            for batch_id in ids:
                await first.until(batch_id, "in_progress")
            failing = {await first.batch_id(line("a")) for _ in range(4)}

            def fail(batch_id):
                if batch_id in failing:
                    raise OSError("the disk is full")
                return take(batch_id)

            monkeypatch.setattr(second.store, "take", fail)
            last = await first.batch_id(line("a"))
            async with second.working():
                await second.until(last, "completed")
        assert len(second.state.fake.started) == 1

    asyncio.run(check())


def test_clients_go_before_batches(server):
    """Of four places batches take three, and none while clients have them."""
    text = "\n".join(line(str(n), prompt="slow") for n in range(10))

    async def check():
        batch_id = await server.batch_id(text)
        server.state.admission.reserve(2, 0)  # two requests of clients
        async with server.working():
            await server.until(batch_id, "in_progress")
            await asyncio.sleep(0.1)
            assert len(server.state.fake.started) == 1
            server.state.admission.release(2, 0)
            while len(server.state.fake.started) < 3:
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.05)
            assert len(server.state.fake.started) == 3

    asyncio.run(check())


def test_files_and_batches_belong_to_a_key(tmp_path):
    server = Server(
        tmp_path, keys=[ApiKey("one", hashlib.sha256(b"k1").digest()), ApiKey("two", hashlib.sha256(b"k2").digest())]
    )

    async def check():
        batch_id = await server.batch_id(line("a"), "k1")
        async with server.working():
            batch = await server.until(batch_id, "completed", key="k1")
        assert len(await server.results(batch.output_file_id, "k1")) == 1
        file = f"/v1/files/{batch.output_file_id}"
        for method, path in [
            ("GET", f"/v1/batches/{batch_id}"),
            ("POST", f"/v1/batches/{batch_id}/cancel"),
            ("GET", file),
            ("GET", f"{file}/content"),
            ("DELETE", file),
        ]:
            error_of(await server.call(method, path, "k2"), 404)
            error_of(await server.call(method, path), 401)
        error_of(await server.create(batch.input_file_id, "k2"), 404)
        for path in ("/v1/files", "/v1/batches"):
            assert (await server.call("GET", path, "k2")).json()["data"] == []

    asyncio.run(check())


def test_a_server_without_a_store_has_no_batches():
    app = create_app(FakeState())
    assert {getattr(route, "path", "") for route in app.routes}.isdisjoint({"/v1/files", "/v1/batches"})


BAD_LINES = {
    "of a wrong type, and then no JSON": '{"custom_id": 1, "url": }',
    "deep": '{"custom_id":"p","url":"/v1/completions","body":{"x":' + "[" * 5000 + "]" * 5000 + "}}",
    "infinite": '{"custom_id":"p","url":"/v1/completions","body":{"stream":1e999}}',
    "with a number for a model": json.dumps({"custom_id": "p", "url": URL, "body": {"prompt": "hi", "model": 5}}),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_line_that_cannot_be_read_costs_one_result(tmp_path, name):
    async def use():
        server = Server(tmp_path)
        batch_id = await server.batch_id("\n".join([line("a"), BAD_LINES[name], line("b")]))
        async with server.working():
            batch = await server.until(batch_id, "completed")
        assert batch.request_counts.completed == 2

    asyncio.run(asyncio.wait_for(use(), 20))


def test_a_batch_with_a_line_that_cannot_be_read_is_cancelled(tmp_path):
    async def use():
        server = Server(tmp_path)
        batch_id = await server.batch_id("\n".join([line("a"), BAD_LINES["deep"], line("b")]))
        assert (await server.call("POST", f"/v1/batches/{batch_id}/cancel")).status_code == 200
        async with server.working():
            await server.until(batch_id, "cancelled")

    asyncio.run(asyncio.wait_for(use(), 20))


def test_a_batch_whose_results_are_broken_has_failed(server):
    async def check():
        batch_id = await server.batch_id(line("a"))
        stored = server.store.take(batch_id)
        server.store.results(stored).write_text("something else\n")
        server.store.release(stored)
        async with server.working():
            batch = await asyncio.wait_for(server.until(batch_id, "failed"), 20)
        assert batch.errors.data[0].code == "broken_results"
        assert "is no output of a batch" in batch.errors.data[0].message

    asyncio.run(check())


def test_a_key_that_goes_leaves_its_files_to_nobody(tmp_path):
    """Of keys without names, which what they own is kept by."""

    def keys(*lines):
        file = tmp_path / "keys"
        file.write_text("\n".join(lines))
        return load_api_keys(ServerConfig(api_key_file=str(file)), {})

    async def use():
        before = Server(tmp_path / "state", keys=keys("sk-alice", "sk-bob"))
        file_id = await before.file_id("alice's prompts", key="sk-alice")
        path = f"/v1/files/{file_id}/content"
        assert (await before.call("GET", path, "sk-bob")).status_code == 404
        after = Server(tmp_path / "state", keys=keys("sk-bob"))
        assert (await after.call("GET", path, "sk-bob")).status_code == 404

    asyncio.run(use())
