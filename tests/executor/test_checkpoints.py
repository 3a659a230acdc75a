"""Checkpoints that are copied to hosts that lack them: what is copied, what is left alone, what goes wrong."""

from __future__ import annotations

import os
import shutil
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import ray

from rayllm.errors import ModelError
from rayllm.executor import checkpoints
from rayllm.executor.checkpoints import (
    CheckpointSource,
    copy_checkpoint,
    fetch_checkpoint,
    list_files,
    offer_checkpoint,
    offered_checkpoint,
)

FILES = {
    "config.json": b"{}",
    "model-1.safetensors": bytes(range(256)) * 5,
    "parts/tokenizer.json": b"",
    ".git/x": b"1",
}


@pytest.fixture
def folder(tmp_path):
    found = tmp_path / "model"
    for name, content in FILES.items():
        (found / name).parent.mkdir(parents=True, exist_ok=True)
        (found / name).write_bytes(content)
    os.utime(found / "config.json", ns=(10**18, 10**18 + 7))
    return found


class Chunks:
    """Of the files of a folder, and which ones were asked for."""

    def __init__(self, folder, size=100):
        self.source, self.size, self.asked = CheckpointSource(str(folder)), size, []

    def __call__(self, file):
        self.asked.append(file.path)
        for offset in range(0, file.size, self.size):
            yield self.source.read(file.path, offset, self.size)


def contents(folder):
    return {file.path: (folder / file.path).read_bytes() for file in list_files(folder)}


PLAIN = {name: content for name, content in FILES.items() if not name.startswith(".")}


def test_what_lacks_is_copied_once_and_weights_only_for_those_who_want_them(folder, tmp_path):
    target, chunks = tmp_path / "here" / "model", Chunks(folder)
    files = chunks.source.files()
    assert copy_checkpoint(target, files, chunks, weights=False) == 2
    assert contents(target).keys() == {"config.json", "parts/tokenizer.json"}
    assert copy_checkpoint(target, files, chunks) == 1280
    assert contents(target) == PLAIN
    assert list_files(target) == files, "times are those of the original"
    chunks.asked.clear()
    assert copy_checkpoint(target, files, chunks) == 0
    assert chunks.asked == []


def test_a_file_that_was_replaced_is_copied_again(folder, tmp_path):
    target, chunks = tmp_path / "copy", Chunks(folder)
    copy_checkpoint(target, chunks.source.files(), chunks)
    with (target / "model-1.safetensors").open("rb") as mapped:
        (folder / "model-1.safetensors").write_bytes(b"\1" * 1280)
        chunks.asked.clear()
        copy_checkpoint(target, chunks.source.files(), chunks)
        assert chunks.asked == ["model-1.safetensors"]
        assert contents(target) == contents(folder)
        assert mapped.read() == FILES["model-1.safetensors"], "who has the old one open keeps it"


def test_a_copy_that_breaks_off_leaves_no_half_of_a_file(folder, tmp_path):
    target, chunks = tmp_path / "copy", Chunks(folder)

    def broken(file):
        if file.is_weights:
            yield np.zeros(7, np.uint8)
            raise OSError("the network is gone")
        yield from chunks(file)

    with pytest.raises(OSError, match="network is gone"):
        copy_checkpoint(target, chunks.source.files(), broken)
    with pytest.raises(OSError, match=r"model-1\.safetensors has changed while it was copied"):
        copy_checkpoint(target, chunks.source.files(), lambda file: iter(()) if file.is_weights else chunks(file))
    assert "model-1.safetensors" not in contents(target)
    assert [path for path in target.iterdir() if path.suffix == ".part"] == []
    copy_checkpoint(target, chunks.source.files(), chunks)
    assert contents(target) == PLAIN


def test_two_processes_copy_once(folder, tmp_path):
    target, chunks = tmp_path / "copy", Chunks(folder, size=1)
    with ThreadPoolExecutor() as pool:
        calls = [pool.submit(copy_checkpoint, target, chunks.source.files(), chunks) for _ in range(4)]
        assert sorted(call.result() for call in calls) == [0, 0, 0, 1282]
    assert contents(target) == PLAIN


def test_a_disk_that_is_too_small_is_an_error_at_once(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: namedtuple("Usage", "free")(1000))
    with pytest.raises(OSError, match="it takes 1282 bytes, and 1000 are free"):
        copy_checkpoint(tmp_path / "copy", CheckpointSource(str(folder)).files(), Chunks(folder))


@pytest.fixture
def snapshot(tmp_path):
    """A model at a commit as the hub's cache has it: links to blobs, among them what another tool has downloaded."""
    files = {"config.json": b"{}", "model.safetensors": b"\2" * 1000, "a.bin": b"1", "original/x.safetensors": b"2"}
    found = tmp_path / "here" / "models--org--m" / "snapshots" / ("0a" * 20)
    (found.parents[1] / "blobs").mkdir(parents=True)
    for number, (name, content) in enumerate(files.items()):
        (found / name).parent.mkdir(parents=True, exist_ok=True)
        blob = found.parents[1] / "blobs" / str(number)
        blob.write_bytes(content)
        (found / name).symlink_to(blob)
    return found


def test_a_snapshot_of_the_hub_is_copied_as_files_and_without_what_nobody_serves(snapshot, tmp_path):
    target, chunks = tmp_path / "there" / "snapshots" / snapshot.name, Chunks(snapshot)
    assert copy_checkpoint(target, chunks.source.files(), chunks) == 1002
    assert contents(target) == {"config.json": b"{}", "model.safetensors": b"\2" * 1000}
    assert not any(path.is_symlink() for path in target.iterdir())


def test_a_snapshot_that_is_not_whole_gets_what_it_lacks_whoever_made_it(snapshot, tmp_path):
    target, chunks = tmp_path / "there" / "snapshots" / snapshot.name, Chunks(snapshot)
    target.mkdir(parents=True)
    (target / "config.json").write_bytes(b"{}")  # at another time than the original
    (target / "model.safetensors").symlink_to(tmp_path / "gone")
    assert copy_checkpoint(target, chunks.source.files(), chunks) == 1000
    assert chunks.asked == ["model.safetensors"]
    assert contents(target)["model.safetensors"] == b"\2" * 1000


def test_a_snapshot_that_is_whole_is_not_written_to(snapshot):
    chunks, before = Chunks(snapshot), sorted(snapshot.rglob("*"))
    assert copy_checkpoint(snapshot, chunks.source.files(), chunks) == 0
    assert sorted(snapshot.rglob("*")) == before and chunks.asked == []


def test_of_an_adapter_only_what_serving_needs(tmp_path):
    for name in (
        "adapter_config.json",
        "adapter_model.safetensors",
        "optimizer.pt",
        "checkpoint-1/adapter_config.json",
    ):
        (tmp_path / "sql" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "sql" / name).write_text("x")
    source = CheckpointSource(str(tmp_path / "sql"))
    assert [file.path for file in source.files()] == ["adapter_config.json", "adapter_model.safetensors"]
    with pytest.raises(FileNotFoundError):
        source.read("optimizer.pt", 0, 1)
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        CheckpointSource(str(tmp_path / "none")).files()


def test_nothing_else_can_be_read(folder):
    source = CheckpointSource(str(folder))
    for path in ("../secret", ".git/x", "/etc/passwd"):
        with pytest.raises(FileNotFoundError):
            source.read(path, 0, 1)


def test_by_ray(folder, tmp_path, ray_cluster, monkeypatch):
    """Both on this host, so the copy's folder is asked for under the original's name."""
    monkeypatch.setattr(checkpoints, "CHUNK", 100)
    target = tmp_path / "elsewhere"
    assert fetch_checkpoint(str(target)) == 0, "nobody offers it"
    assert fetch_checkpoint(str(folder)) == 0, "it is here"
    monkeypatch.setattr(checkpoints, "_name", lambda _folder: "checkpoint of test")
    end = offer_checkpoint(str(folder), ray.get_runtime_context().get_node_id())
    try:
        assert fetch_checkpoint(str(folder)) == 0, "it is here, and no copy"
        assert fetch_checkpoint(str(target)) == 1282
        assert contents(target) == PLAIN
        assert fetch_checkpoint(str(target)) == 0
        (tmp_path / "file").write_text("")
        with pytest.raises(
            ModelError, match=r"file/model is not on host .* nor can it be copied there: .*File exists: .*/file'"
        ):
            fetch_checkpoint(str(tmp_path / "file" / "model"))
        with offered_checkpoint(str(folder)):
            pass
        assert fetch_checkpoint(str(target)) == 0, "the server's offer goes on"
    finally:
        end()


def test_an_offer_ends_with_its_block(folder, tmp_path, ray_cluster, monkeypatch):
    monkeypatch.setattr(checkpoints, "_name", lambda _folder: "checkpoint of a block")
    with offered_checkpoint(str(folder)):
        assert fetch_checkpoint(str(tmp_path / "first")) == 1282
    assert fetch_checkpoint(str(tmp_path / "second")) == 0, "nobody offers it"
