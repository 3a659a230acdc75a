"""Folders of engines: private, and gone when their owners are, however that was."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile

import pytest

from rayllm.engine.folder import PrivateFolder, SharedFolder, remove_orphaned_folders
from rayllm.errors import StartupError

OWNER = """
import sys, time
from rayllm.engine.folder import PrivateFolder
folder = PrivateFolder()
(folder.path / "engine.sock").touch()
print(folder.path, flush=True)
time.sleep(77)
"""


@pytest.fixture(autouse=True)
def _own_files(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_it_is_private_and_removed():
    folder = PrivateFolder()
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    folder.remove()
    assert os.listdir(tempfile.gettempdir()) == []


def test_those_of_killed_owners_are_removed_and_no_others(tmp_path):
    owners = [subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        killed, alive = [os.path.basename(owner.stdout.readline().strip()) for owner in owners]
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "rayllm-run-link").symlink_to(tmp_path / "elsewhere")
        others = {"elsewhere", "rayllm-run-link", alive}
        owners[0].send_signal(signal.SIGKILL)
        owners[0].wait()
        folder = PrivateFolder()
        assert set(os.listdir(tmp_path)) == {folder.path.name, *others}
        owners[1].send_signal(signal.SIGKILL)
        owners[1].wait()
        remove_orphaned_folders()
        assert set(os.listdir(tmp_path)) == {folder.path.name, *(others - {alive})}
        folder.remove()
    finally:
        for owner in owners:
            owner.kill()
            owner.wait()
            owner.stdout.close()
    assert killed not in os.listdir(tmp_path)


def test_the_last_one_to_leave_removes_a_shared_one(tmp_path):
    first, second = SharedFolder("x1"), SharedFolder("x1")
    assert first.path == second.path and stat.S_IMODE(first.path.stat().st_mode) == 0o700
    (first.path / "file").touch()
    first.leave()
    remove_orphaned_folders()
    assert (second.path / "file").exists()
    second.leave()
    assert os.listdir(tmp_path) == []
    third = SharedFolder("x1")
    assert list(third.path.iterdir()) == [], "whoever comes later begins anew"
    third.leave()


def test_a_shared_one_that_nobody_has_any_more_is_removed(tmp_path):
    (tmp_path / "rayllm-run-x1").mkdir(mode=0o700)
    (tmp_path / "rayllm-run-x1" / "file").touch()
    other = SharedFolder("x2")
    assert os.listdir(tmp_path) == [other.path.name]
    other.leave()


def test_a_shared_one_is_no_other_users(tmp_path):
    path = tmp_path / "rayllm-run-x1"
    path.mkdir()
    path.chmod(0o755)
    with pytest.raises(StartupError, match="must belong to this user"):
        SharedFolder("x1")
    path.rmdir()
    path.symlink_to(tmp_path)
    with pytest.raises(OSError, match=r"Not a directory|symbolic"):
        SharedFolder("x1")
