"""What `ray_compat` uses of Ray beyond its public API is still there, and does what it did."""

from __future__ import annotations

from rayllm.executor.ray_compat import log_folder, noted_cluster


def test_the_cluster_that_ray_start_noted(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert noted_cluster() is None
    note = tmp_path / "ray" / "ray_current_cluster"
    note.parent.mkdir()
    note.write_text("10.1.2.3:6379\n")
    assert noted_cluster() == "10.1.2.3:6379"


def test_the_folder_of_the_logs(ray_cluster):
    folder = log_folder()
    assert folder is not None and folder.is_dir()
    assert any(each.name.startswith("raylet") for each in folder.iterdir())
