"""Imports point downward: serve -> engine -> core; engine -> executor -> worker -> models -> layers -> kernels."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BASE = {"errors", "api", "config"}
# What each package may import of rayllm, beside BASE and itself.
ALLOWED = {
    "api": set(),
    "config": set(),
    "core": set(),
    "text": set(),
    "parallel": {"kernels"},
    "sampling": {"kernels"},
    "layers": {"parallel", "kernels"},
    "models": {"layers", "parallel", "kernels"},
    "worker": {"models", "layers", "sampling", "parallel", "kernels"},
    "executor": {"worker", "parallel"},
    "engine": {"core", "text", "executor", "worker"},
    "serve": {"engine", "text", "executor"},
}
FOREIGN = {"core": {"torch", "ray", "numpy", "time", "transformers"}, "serve": {"torch"}, "engine": {"torch"}}


def imports_of(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add("" if node.level else node.module or "")
    return names


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_imports_point_downward(package):
    files = sorted((ROOT / "rayllm" / package).glob("**/*.py"))
    assert len(files) > 1, "nothing to check"
    for path in files:
        for name in imports_of(path):
            parts = name.split(".")
            assert parts[0] not in FOREIGN.get(package, set()), f"{path.name} imports {name}"
            target = (
                parts[1]
                if parts[0] == "rayllm" and len(parts) > 1
                else "kernels"
                if parts[0] == "rayllm_kernels"
                else ""
            )
            if target and target not in BASE:
                assert target == package or target in ALLOWED[package], f"{path.name} imports {name}"


def test_kernels_stand_alone():
    files = sorted((ROOT / "kernels" / "rayllm_kernels").rglob("*.py"))
    assert len(files) > 30, "nothing to check"
    for path in files:
        assert not any(name.split(".")[0] == "rayllm" for name in imports_of(path)), path.name
