"""Folders of engines: private, and gone when their owners are, however that was."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile

import pytest

from rayllm.engine.folder import PrivateFolder, remove_orphaned_folders

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
