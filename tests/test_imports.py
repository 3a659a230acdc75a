"""Imports point downward, between packages and within them, and third parties are used by their public names.

All imports count: at the top, in functions, and below `if TYPE_CHECKING`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PATHS = {"rayllm": ROOT / "rayllm", "rayllm_kernels": ROOT / "kernels" / "rayllm_kernels"}
# From the bottom to the top: what each part may import, beside itself. Loose modules stand for themselves.
MAY_IMPORT = {
    "rayllm_kernels": set(),
    "version": set(),
    "errors": set(),
    "timeouts": set(),
    "parent_death": set(),
    "api": {"errors"},
    "config": {"api", "errors"},
    "hub": {"config", "errors"},
    "parallel": {"rayllm_kernels", "api", "errors", "timeouts"},
    "layers": {"rayllm_kernels", "parallel", "config", "api", "errors"},
    "models": {"rayllm_kernels", "layers", "parallel", "config", "errors"},
    "sampling": {"rayllm_kernels", "api", "errors"},
    "worker": {"rayllm_kernels", "models", "layers", "sampling", "parallel", "config", "api", "errors", "timeouts"},
    "core": {"config", "api", "errors"},
    "text": {"config", "api", "errors", "timeouts", "parent_death"},
    "executor": {"hub", "worker", "parallel", "config", "api", "errors", "timeouts"},
    "engine": {"hub", "core", "text", "executor", "worker", "config", "api", "errors", "timeouts"},
    "llm": {"hub", "engine", "text", "config", "api", "errors"},
    "batch": {"errors"},
    "serve": {
        "hub",
        "batch",
        "engine",
        "text",
        "executor",
        "config",
        "api",
        "errors",
        "timeouts",
        "parent_death",
        "version",
    },
    "cli": {"llm", "batch", "serve", "engine", "text", "executor", "config", "api", "errors", "timeouts", "version"},
    "__init__": {"llm", "api", "version"},
}
# What parts keep out: the scheduler runs in simulators, fronts on hosts without GPUs.
FOREIGN = {"core": {"torch", "ray", "time", "transformers"}, "serve": {"torch"}, "api": {"torch", "ray"}}
THIRD_PARTIES = {"ray", "torch", "triton"}
COMPAT = {
    "rayllm/executor/ray_compat.py",
    "rayllm/serve/cluster/serve_compat.py",
    "rayllm/parallel/torch_compat.py",
    "kernels/rayllm_kernels/compat.py",
}


def modules() -> dict[str, Path]:
    """Dotted name -> file, of both packages."""
    found = {}
    for package, folder in PATHS.items():
        for path in folder.rglob("*.py"):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imported(name: str, tree: ast.AST) -> Iterator[str]:
    """Dotted names that a module imports, its own packages' as modules; `from x import y` is x.y if that is one."""
    package = name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                yield whole if whole in MODULES else base


def part_of(name: str) -> str:
    """The row of MAY_IMPORT that a module belongs to."""
    parts = name.split(".")
    if parts[0] == "rayllm_kernels":
        return parts[0]
    return parts[1] if len(parts) > 1 else "__init__"


TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}
GRAPH = {name: set(imported(name, tree)) for name, tree in TREES.items()}


def test_every_part_is_in_the_table():
    assert {part_of(name) for name in MODULES} == set(MAY_IMPORT)


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_point_downward(name):
    part = part_of(name)
    for target in GRAPH[name]:
        root = target.split(".")[0]
        assert root not in FOREIGN.get(part, set()), f"{name} imports {target}"
        if root in PATHS:
            assert part_of(target) in MAY_IMPORT[part] | {part}, f"{name} imports {target}"


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """Some cycle of the graph, or nothing."""
    done: set[str] = set()
    trail: list[str] = []

    def visit(name: str) -> list[str]:
        if name in trail:
            return [*trail[trail.index(name) :], name]
        if name in done or name not in graph:
            return []
        trail.append(name)
        found = next((found for target in sorted(graph[name]) if (found := visit(target))), [])
        trail.pop()
        done.add(name)
        return found

    return next((found for name in sorted(graph) if (found := visit(name))), [])


def test_there_are_no_cycles():
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert not cycle(GRAPH)


def test_the_table_has_no_cycles():
    assert not cycle(MAY_IMPORT)


def private_uses(tree: ast.AST) -> Iterator[str]:
    """Names of THIRD_PARTIES with a leading underscore: imported, or reached from what was imported."""
    bound: dict[str, str] = {}

    def private(dotted: str) -> bool:
        parts = dotted.split(".")
        return parts[0] in THIRD_PARTIES and any(part.startswith("_") and not part.endswith("__") for part in parts)

    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
                if private(alias.name):
                    yield alias.name
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                bound[alias.asname or alias.name] = whole
                if private(whole):
                    yield whole
    for node in ast.walk(tree):
        names = []
        while isinstance(node, ast.Attribute):
            names.append(node.attr)
            node = node.value
        if names and isinstance(node, ast.Name) and node.id in bound:
            whole = ".".join([bound[node.id], *reversed(names)])
            if private(whole):
                yield whole


def test_private_names_stay_in_the_compat_modules():
    sample = (
        "import torch\nimport ray._private.x\nfrom ray import _raylet\nx = torch.cuda._sleep\ny = torch.__version__"
    )
    assert sorted(set(private_uses(ast.parse(sample)))) == ["ray._private.x", "ray._raylet", "torch.cuda._sleep"]
    for name, path in MODULES.items():
        if str(path.relative_to(ROOT)) not in COMPAT:
            assert not list(private_uses(TREES[name])), name
    assert all((ROOT / path).exists() for path in COMPAT)
