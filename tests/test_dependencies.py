"""What the packages import is declared in pyproject.toml."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parents[1]
OWN = {"rayllm", "rayllm_kernels", "rayllm_benchmarks"}


def imported():
    """Top-level names that rayllm/ and kernels/ import, those of the standard library left out."""
    names = set()
    for path in [*(ROOT / "rayllm").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names.add((node.module or "").partition(".")[0])
    return names - set(sys.stdlib_module_names) - OWN


def test_every_import_is_a_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    requirements = project["dependencies"] + extras["otel"] + extras["batch"]
    declared = {re.match(r"[\w-]+", each).group().lower().replace("_", "-") for each in requirements}
    distributions = packages_distributions()
    found = imported()
    assert len(found) > 15, "nothing to check"
    for name in found:
        sources = {each.lower().replace("_", "-") for each in distributions.get(name, [name])}
        assert sources & declared, f"{name} comes with {sources}, which pyproject.toml does not name"
