"""The runner over a fake `ask`: each line has one result, runs go on, refusals are tried again, few are in flight."""

import asyncio
import errno
import json
import os
from pathlib import Path

import pytest

from rayllm.batch import result_file, runner
from rayllm.batch.lines import BatchRequest, answered
from rayllm.batch.result_file import ResultFile
from rayllm.batch.runner import check_results, run_batch
from rayllm.errors import ConfigError, EngineDeadError, OutputError

URL = "/v1/completions"


def requests(*custom_ids):
    return [json.dumps({"custom_id": each, "url": URL, "body": {"prompt": each}}).encode() for each in custom_ids]


async def source(lines):
    for line in lines:
        yield line


async def echo(request):
    await asyncio.sleep(0)
    usage = {"prompt_tokens": 2, "completion_tokens": 3}
    return 200, json.dumps({"text": json.loads(request.body)["prompt"], "usage": usage}).encode()


def run(path, lines, ask=echo, limit=4):
    """Run a batch with its output there; the counts."""
    results = ResultFile(path)
    try:
        asyncio.run(run_batch(source(lines), [URL], ask, results, results.counts, limit))
    finally:
        results.close()
    return results.counts


def answers(path):
    """custom_id -> its one answer: the text, the status if it is not 200, or the code of the error."""
    found = {}
    for each in map(json.loads, path.read_text().splitlines()):
        assert each["custom_id"] not in found
        response = each["response"]
        if response is None:
            found[each["custom_id"]] = each["error"]["code"]
        else:
            found[each["custom_id"]] = (
                response["body"]["text"] if response["status_code"] == 200 else response["status_code"]
            )
    return found


@pytest.fixture
def path(tmp_path):
    return tmp_path / "out.jsonl"


def test_each_request_has_its_answer(path):
    counts = run(path, [*requests("a", "b", "c"), b"bad"])
    assert answers(path) == {"a": "a", "b": "b", "c": "c", None: "invalid_json"}
    assert (counts.completed, counts.failed, counts.prompt_tokens, counts.completion_tokens) == (3, 1, 6, 9)


def test_an_answer_that_is_an_error_is_a_result(path):
    async def refuse(request):
        return 400, b'{"error": {"message": "no"}}'

    counts = run(path, requests("a"), refuse)
    assert answers(path) == {"a": 400}
    assert (counts.completed, counts.failed) == (0, 1)


def test_a_run_that_broke_off_goes_on(path):
    lines = [*requests(*map(str, range(40))), b"bad", b"bad", *requests("7")]
    asked = []

    def dies_after(count):
        async def ask(request):
            if len(asked) >= count:
                raise EngineDeadError("gone")
            asked.append(request.custom_id)
            return await echo(request)

        return ask

    for count in (5, 25):
        with pytest.raises(EngineDeadError):
            run(path, lines, dies_after(count))
        with path.open("ab") as file:
            file.write(b'{"id": "batch_req_bro')  # a write that was cut short
    counts = run(path, lines, dies_after(1000))
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted(each["custom_id"] for each in found if each["response"]) == sorted(map(str, range(40)))
    assert [each["error"]["code"] for each in found if each["error"]].count("invalid_json") == 2
    assert [each["error"]["code"] for each in found if each["error"]].count("duplicate_custom_id") == 1
    assert counts.done == len(found) == 43
    before = path.read_bytes()
    assert run(path, lines, dies_after(0)).done == 43  # nothing is left to ask
    assert path.read_bytes() == before


def test_what_is_refused_for_now_is_tried_again(path, monkeypatch):
    monkeypatch.setattr(runner, "RETRY_S", 0.001)
    tries = []

    async def ask(request):
        tries.append(request.custom_id)
        return await echo(request) if len(tries) > 3 else (429 if len(tries) % 2 else 503, b"{}")

    run(path, requests("a"), ask)
    assert tries == ["a"] * 4
    assert answers(path) == {"a": "a"}


def test_so_many_are_in_flight(path):
    running, most = 0, 0

    async def ask(request):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        return await echo(request)

    run(path, requests(*map(str, range(30))), ask, limit=7)
    assert most == 7


def test_a_cancelled_run_keeps_what_is_done(path):
    async def ask(request):
        if request.custom_id == "never":
            await asyncio.sleep(60)
        return await echo(request)

    async def cancel():
        results = ResultFile(path)
        work = run_batch(source(requests("a", "b", "never")), [URL], ask, results, results.counts, 2)
        task = asyncio.create_task(work)
        while results.counts.done < 2:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert answers(path) == {"a": "a", "b": "b"}  # before it is closed
        results.close()

    asyncio.run(cancel())


def test_results_are_flushed_while_others_run(path, monkeypatch):
    monkeypatch.setattr(runner, "FLUSH_S", 0.005)

    async def ask(request):
        while request.custom_id == "last" and not path.read_bytes():
            await asyncio.sleep(0.001)
        return await echo(request)

    run(path, requests("first", "last"), ask)
    assert set(answers(path)) == {"first", "last"}


def test_an_output_of_other_requests_is_refused(path):
    run(path, requests("a", "b"))
    with pytest.raises(ConfigError, match="1 result is of other lines"):
        asyncio.run(check_results(source(requests("a", "c")), [URL], opened := ResultFile(path)))
    opened.close()
    with pytest.raises(ConfigError, match="does not belong to the input"):
        run(path, requests("c"))


def test_an_output_that_is_something_else_is_refused(path):
    path.write_text("my notes\n")
    with pytest.raises(ConfigError, match="its line 1 is not a result"):
        ResultFile(path)
    assert path.read_text() == "my notes\n"
    with pytest.raises(ConfigError, match="cannot be opened"):
        ResultFile(path / "below")
    with pytest.raises(ConfigError, match="/dev/full is no regular file"):
        ResultFile(Path("/dev/full"))  # which has zeros without an end


def test_an_output_is_written_by_one_at_a_time(path):
    first = ResultFile(path)
    with pytest.raises(ConfigError, match="in use by another process"):
        ResultFile(path)
    first.close()
    ResultFile(path).close()


class FullDisk:
    """`os.write` on a disk that takes so many more bytes."""

    def __init__(self, monkeypatch, room):
        self.room, self.write = room, os.write
        monkeypatch.setattr(result_file.os, "write", self)

    def __call__(self, file, data):
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self.write(file, data[: self.room])
        self.room -= written
        return written


def test_what_could_not_be_written_is_written_later(path, monkeypatch):
    disk = FullDisk(monkeypatch, 10**6)
    results = ResultFile(path)

    def add(name):
        results.add(answered(BatchRequest(f"batch_req_{name}", name, URL, b"{}"), 200, b'{"text": "x"}'))

    add("a")
    results.flush()
    disk.room = 20
    add("b")
    with pytest.raises(OutputError, match=r"out\.jsonl cannot be written: No space left on device"):
        results.flush()
    assert set(answers(path)) == {"a"}, "no half of a line"
    add("c")
    disk.room = 10**6
    results.close()
    assert answers(path) == {"a": "x", "b": "x", "c": "x"}


def test_a_run_ends_when_its_results_cannot_be_written(path, monkeypatch):
    monkeypatch.setattr(runner, "FLUSH_S", 0.01)
    disk = FullDisk(monkeypatch, 0)

    async def ask(request):
        if b'"slow"' in request.body:
            await asyncio.Event().wait()
        return await echo(request)

    async def main():
        results = ResultFile(path)
        work = run_batch(source(requests("a", "slow")), [URL], ask, results, results.counts, 4)
        with pytest.raises(OutputError):
            await asyncio.wait_for(work, 20)
        disk.room = 10**6
        results.close()

    asyncio.run(main())
    assert answers(path) == {"a": "a"}
    assert run(path, requests("a", "slow")).completed == 2
