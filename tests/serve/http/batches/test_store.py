"""BatchStore and its terms: of all servers that work on a batch one ends it, also when another stood still."""

from __future__ import annotations

import io
import threading

import msgspec
import pytest

from rayllm import timeouts
from rayllm.batch.lines import BatchResult, Response
from rayllm.batch.result_file import ResultFile
from rayllm.serve.http.batches.files import FileLimits
from rayllm.serve.http.batches.store import BatchStore
from rayllm.serve.http.batches.terms import begin_term, last_term
from rayllm.serve.http.errors import ApiError

SILENCE_S = timeouts.BATCH_SILENCE_S


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def stores(tmp_path, clock):
    """Of two API servers, on one folder. The second one's clock is `clock`."""
    return BatchStore(tmp_path), BatchStore(tmp_path, monotonic=clock)


def make(store):
    file = store.files.add(io.BytesIO(b"{}"), "in.jsonl", "batch", "")
    return store.create("", "/v1/completions", file.id, "24h", None, None).id


def answer(store, stored, *custom_ids):
    """Add results, and give all that its term has."""
    results = ResultFile(store.results(stored))
    for custom_id in custom_ids:
        results.add(BatchResult(custom_id, custom_id, Response(200, "r", msgspec.Raw(b"{}")), None))
    results.close()
    return results.answered


def complete(store, stored):
    """As a server ends a batch: first its file, then the end."""
    lines = store.results(stored).read_bytes()
    stored.batch.output_file_id = store.files.put(stored.file_id("output"), [lines], "o", "batch_output", "").id
    stored.batch.status = "completed"
    return store.end(stored)


def outputs(store):
    return {file.id for file in store.files.owned_by("") if file.purpose == "batch_output"}


def test_a_batch_is_taken_by_one(stores):
    first, second = stores
    batch_id = make(first)
    assert first.waiting() == second.waiting() == [batch_id]
    mine = first.take(batch_id)
    assert mine.term == 1 and second.take(batch_id) is None
    assert second.waiting() == []


def test_a_lost_server_is_followed_when_its_beat_stands_still(stores, clock):
    first, second = stores
    batch_id = make(first)
    mine = first.take(batch_id)
    for _ in range(4):
        assert second.waiting() == [] and second.take(batch_id) is None
        clock.now += SILENCE_S - 1
        assert first.beat(mine)
    answer(first, mine, "a")
    assert second.waiting() == []
    clock.now += SILENCE_S
    assert second.waiting() == []
    clock.now += 1
    assert second.waiting() == [batch_id]
    theirs = second.take(batch_id)
    assert theirs.term == 2 and answer(second, theirs) == {"a"}


def test_what_is_let_go_of_waits_behind_others(tmp_path):
    clock = Clock()
    store = BatchStore(tmp_path, clock=clock)
    ids = []
    for _ in range(2):
        ids.append(make(store))
        clock.now += 1
    store.release(store.take(ids[0]))
    assert store.waiting() == ids[::-1]


@pytest.mark.parametrize("wakes", ["after the take-over", "after the answers", "after the end"])
def test_who_stood_still_writes_nothing_that_counts(stores, clock, wakes):
    """The first server is stopped after its last answer, and knows nothing of the second one when it goes on."""
    first, second = stores
    batch_id = make(first)
    mine = first.take(batch_id)
    answer(first, mine, "a")
    opened = ResultFile(first.results(mine))
    second.waiting()
    clock.now += SILENCE_S + 1
    theirs = second.take(batch_id)
    assert not first.is_last(mine) and not first.beat(mine)

    def wake_up():
        opened.add(BatchResult("b", "b", None, None))
        opened.close()
        with pytest.raises(FileNotFoundError):
            first.save(mine)
        mine.batch.output_file_id = first.files.put(mine.file_id("output"), [b"1"], "o", "batch_output", "").id
        mine.batch.status = "completed"
        assert not first.end(mine)
        first.release(mine)

    if wakes == "after the take-over":
        wake_up()
        assert first.get(batch_id, "").output_file_id is None
    assert answer(second, theirs, "b", "c") == {"a", "b", "c"}
    if wakes == "after the answers":
        wake_up()
    assert complete(second, theirs)
    if wakes == "after the end":
        wake_up()
    for store in stores:
        batch = store.get(batch_id, "")
        assert batch.status == "completed" and outputs(store) == {batch.output_file_id}
        assert len(store.files.content(batch.output_file_id, "").read_bytes().splitlines()) == 3
        assert store.waiting() == [] and store.take(batch_id) is None
        with pytest.raises(ApiError) as error:
            store.cancel(batch_id, "")
        assert error.value.status_code == 409


def test_files_of_a_server_that_died_at_the_end_go(stores, clock):
    first, second = stores
    batch_id = make(first)
    mine = first.take(batch_id)
    answer(first, mine, "a")
    first.files.put(mine.file_id("output"), [b"half"], "o", "batch_output", "")  # and is killed
    second.waiting()
    clock.now += SILENCE_S + 1
    theirs = second.take(batch_id)
    assert complete(second, theirs)
    assert outputs(second) == {theirs.batch.output_file_id}


def test_a_line_that_broke_off_is_not_taken_over(stores, clock):
    first, second = stores
    batch_id = make(first)
    mine = first.take(batch_id)
    answer(first, mine, "a")
    with first.results(mine).open("ab") as file:
        file.write(b'{"id": "batch_req_b", ')
    first.release(mine)
    theirs = second.take(batch_id)
    assert answer(second, theirs, "b") == {"a", "b"}


def test_batches_go_as_a_whole_when_they_are_old(tmp_path, clock):
    now = Clock()
    store = BatchStore(tmp_path, FileLimits(ttl=3600), clock=now)
    ended, runs = make(store), make(store)
    answer(store, taken := store.take(ended), "a")
    assert complete(store, taken)
    now.now = (tmp_path / "batches" / ended).stat().st_mtime + 3601
    store.sweep()
    assert [path.name for path in (tmp_path / "batches").iterdir()] == [runs]


# ---- terms


def test_one_of_many_begins_a_term(tmp_path):
    won = []

    def race():
        for number in range(20):
            barrier.wait()
            if begin_term(tmp_path, number, lambda folder: (folder / "x").touch()):
                won.append(number)

    barrier = threading.Barrier(4)
    threads = [threading.Thread(target=race) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert won == list(range(20))
    assert [path.name for path in tmp_path.iterdir()] == ["19"]


@pytest.mark.parametrize("later", [1, 2, 3])
def test_who_stood_still_before_its_term_began_has_lost(tmp_path, later):
    """Others have begun the same term meanwhile, and perhaps later ones, so that the place is free again."""

    def stand_still(folder):
        for number in range(1, later + 1):
            assert begin_term(tmp_path, number, lambda _folder: None)

    assert begin_term(tmp_path, 0, lambda _folder: None)
    assert not begin_term(tmp_path, 1, stand_still)
    assert last_term(tmp_path) == later


def test_a_term_is_there_as_a_whole_or_not_at_all(tmp_path):
    def fail(folder):
        (folder / "x").touch()
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        begin_term(tmp_path, 0, fail)
    assert last_term(tmp_path) is None and not list(tmp_path.iterdir())
    assert not begin_term(tmp_path / "gone", 0, lambda _folder: None)
