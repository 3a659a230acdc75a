"""ResponseStore: files, bounds, and who runs what."""

from __future__ import annotations

import os
import stat
import time

import pytest

from rayllm.serve.http.responses.store import ResponseStore, StoredResponse, StoreLimits


def response_id(number):
    return f"resp_{number:032x}"


def stored(number, status="completed", owner="", text=""):
    return StoredResponse(owner, {"id": response_id(number), "status": status, "text": text}, [{"id": "msg_1"}])


def age(folder, number, seconds, kind=".json"):
    then = time.time() - seconds
    os.utime(folder / f"{response_id(number)}{kind}", (then, then))


def there(folder):
    return sorted(int(path.stem[5:], 16) for path in folder.glob("*.json"))


def test_what_is_written_is_read_by_its_owner(tmp_path):
    store, other = ResponseStore(tmp_path), ResponseStore(tmp_path)
    store.write(stored(1, owner="a"))
    assert other.read(response_id(1), "a") == stored(1, owner="a")
    assert other.read(response_id(1), "b") is None
    other.delete(response_id(1))
    assert store.read(response_id(1), "a") is None


def test_nobody_else_may_read_the_files(tmp_path):
    store = ResponseStore(tmp_path)
    before = os.umask(0)
    try:
        store.claim(response_id(1))
        store.write(stored(1))
        store.log(response_id(1), b"{}\n")
        store.cancel(response_id(1))
    finally:
        os.umask(before)
    files = list(tmp_path.iterdir())
    assert len(files) == 5
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}


@pytest.mark.parametrize(
    "name", ["", "x", "../resp_1", "resp_" + "g" * 32, response_id(1) + "\n", response_id(1) + "/.."]
)
def test_only_ids_become_paths(tmp_path, name):
    store = ResponseStore(tmp_path / "in")
    (tmp_path / "in").mkdir()
    store.write(stored(1))
    assert store.read(name, "") is None


def test_the_oldest_go_first(tmp_path):
    store = ResponseStore(tmp_path, StoreLimits(responses=8))
    for number in range(8):
        store.write(stored(number))
        age(tmp_path, number, 100 - number)
    store.write(stored(8))
    assert there(tmp_path) == [2, 3, 4, 5, 6, 7, 8], "some room is made at once"


def test_bytes_have_a_bound(tmp_path):
    store = ResponseStore(tmp_path, StoreLimits(num_bytes=10_000))
    for number in range(30):
        store.write(stored(number, text="x" * 1000))
        age(tmp_path, number, 100 - number)
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 10_000
    assert there(tmp_path)[-1] == 29
    store.write(stored(99, text="x" * 20_000))
    assert 99 not in there(tmp_path), "what has no room at all is not kept"


def test_what_is_too_old_goes(tmp_path):
    store = ResponseStore(tmp_path, StoreLimits(ttl=50))
    for number in range(3):
        store.write(stored(number))
    age(tmp_path, 0, 60)
    assert store.read(response_id(0), "") is None, "also before it is removed"
    store.claim(response_id(1))
    age(tmp_path, 1, 60)
    assert store.read(response_id(1), "") is not None, "it runs"
    (tmp_path / ".new-1").touch()
    os.utime(tmp_path / ".new-1", (0, 0))  # of an API server that was killed
    store.sweep()
    assert there(tmp_path) == [1, 2]
    assert not (tmp_path / ".new-1").exists()


def test_what_runs_goes_last(tmp_path):
    store = ResponseStore(tmp_path, StoreLimits(responses=2))
    store.claim(response_id(0))
    store.write(stored(0, "in_progress"))
    age(tmp_path, 0, 100)
    for number in (1, 2, 3):
        store.write(stored(number))
    assert 0 in there(tmp_path)


def test_one_runs_it(tmp_path):
    first, second = ResponseStore(tmp_path), ResponseStore(tmp_path)
    name = response_id(1)
    assert first.claim(name)
    first.write(stored(1, "in_progress"))
    assert first.beat(name) and not second.beat(name)
    assert not second.claim(name, lost_s=5)
    age(tmp_path, 1, 6, ".run")
    assert second.claim(name, lost_s=5)
    assert not ResponseStore(tmp_path).claim(name, lost_s=5), "only one takes it over"
    assert second.beat(name) and not first.beat(name), "who was taken to be dead learns it"
    assert not first.finish(stored(1))
    assert first.read(name, "").response["status"] == "in_progress"
    second.release(name)
    assert first.claim(name, lost_s=5), "at once"
    first.cancel(name)
    assert first.is_cancelled(name)
    assert first.finish(stored(1))
    assert not first.is_cancelled(name) and not first.runs(name)
    assert not second.claim(name, lost_s=5), "it has ended"


def test_what_was_deleted_does_not_come_back(tmp_path):
    store = ResponseStore(tmp_path)
    store.claim(response_id(1))
    store.write(stored(1, "in_progress"))
    store.delete(response_id(1))
    assert not store.beat(response_id(1)) and not store.finish(stored(1))
    assert not store.claim(response_id(1), lost_s=5)
    assert not there(tmp_path)


def test_a_log_has_whole_lines(tmp_path):
    store, name = ResponseStore(tmp_path), response_id(1)
    assert store.events(name) is None
    store.log(name, b'{"a": 1}\n{"b": 2}\n')
    found = store.events(name)
    assert found.lines == [b'{"a": 1}', b'{"b": 2}']
    store.log(name, b'{"c"')
    assert store.events(name, found.offset) == ([], found.offset)
    assert store.cut_log(name) == found.lines, "what was about to be written when its API server died"
    store.log(name, b'{"d": 4}\n')
    assert store.events(name, found.offset).lines == [b'{"d": 4}']
