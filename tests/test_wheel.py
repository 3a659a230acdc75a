"""The wheel, built from what the Dockerfile copies: what it contains, and that it works where no checkout is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import rayllm

ROOT = Path(__file__).parents[1]
# Folders of packages, under their names in the wheel.
PACKAGES = {"rayllm": "rayllm", "kernels/rayllm_kernels": "rayllm_kernels"}
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input"]
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TRITON"))}


def copied():
    """What the Dockerfile copies from the checkout."""
    lines = [line.split() for line in (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()]
    return [source for words in lines if words[:1] == ["COPY"] for source in words[2:-1]]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("image")
    for name in copied():
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    build = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", folder / "dist", folder]
    subprocess.run([*PIP, *build], check=True, env=ENVIRONMENT, timeout=120)
    (built,) = (folder / "dist").glob("*.whl")
    return built


def test_it_is_for_every_platform_and_has_all_files_of_the_packages(wheel):
    assert wheel.name == f"rayllm-{rayllm.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        found = set(archive.namelist())
    expected = {
        f"{name}/{path.relative_to(ROOT / folder)}"
        for folder, name in PACKAGES.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    expected |= {f"rayllm_benchmarks/{path.name}" for path in (ROOT / "benchmarks").glob("*.py")}
    assert {"rayllm/py.typed", "rayllm/assets/tiny-pydoc/model.safetensors"} <= expected
    assert not expected - found, "package-data of pyproject.toml, or packages of setup.py, lack them"
    assert not {name for name in found if name.endswith((".pyc", ".so"))}
    information = {name.partition("/")[2] for name in found - expected}
    assert {"METADATA", "entry_points.txt", "licenses/LICENSE"} <= information
    assert {name.partition("/")[0] for name in found - expected} == {f"rayllm-{rayllm.__version__}.dist-info"}


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """An environment with the wheel. Its dependencies are those of this interpreter, but for rayllm."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, env=ENVIRONMENT)
    packages = next((folder / "lib").glob("python*/site-packages"))
    # A folder in such a file is searched for packages; its own .pth files, as those of editable installs, are not read.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    install = [*PIP, "--python", folder / "bin" / "python", "install", "--no-deps", "--no-index", wheel]
    subprocess.run(install, check=True, env=ENVIRONMENT, timeout=120)
    return folder


def run(program, *args, cwd):
    done = subprocess.run([program, *args], cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_brings_what_it_imports_and_generates_text(installed, tmp_path):
    names = [*PACKAGES.values(), "rayllm_benchmarks.offline", "rayllm_kernels.ops"]
    code = f"import importlib\nfor name in {names}: print(importlib.import_module(name).__file__)"
    files = run(installed / "bin" / "python", "-c", code, cwd=tmp_path).splitlines()
    assert len(files) == len(names)
    assert all(Path(file).is_relative_to(installed) for file in files), files
    command = installed / "bin" / "rayllm"
    assert run(command, "--version", cwd=tmp_path) == f"{rayllm.__version__}\n"
    small = ["--device", "cpu", "--max-model-len", "128", "--num-gpu-blocks-override", "32"]
    text = run(
        command, "generate", "The for statement", "--temperature", "0", "--max-tokens", "6", *small, cwd=tmp_path
    )
    assert text.strip()
