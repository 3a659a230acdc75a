"""What the documentation names is there: linked pages, files, options, tests; and what is there is documented."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import typer
import yaml

from rayllm.cli.main import app
from rayllm.config.options import EngineConfig, ServerConfig, check_names

ROOT = Path(__file__).parents[1]
GUIDES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
DECISIONS = sorted((ROOT / "docs/decisions").glob("*.md"))
PAGES = [*GUIDES, *DECISIONS, ROOT / "CHANGELOG.md", *sorted((ROOT / "benchmarks").glob("*.md"))]
FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir()}
HISTORY = {"benchmarks/kernels.py"}  # named where the changelog says what became of it
OPTIONS = {**EngineConfig.model_fields, **ServerConfig.model_fields}
COMMANDS = typer.main.get_command(app).commands
# Of `rayllm bench`, whose scripts declare them as parameters; of our tests, Ray and Docker.
BENCHMARK_FLAGS = {
    f"--{name.replace('_', '-')}"
    for script in ("serve", "offline")
    for name in re.findall(r"^    (\w+): Annotated\[", (ROOT / f"benchmarks/{script}.py").read_text(), re.MULTILINE)
}
OTHERS_FLAGS = {"--autoscaling-config", "--full-matrix", "--tmux", "--ulimit"}


def unfenced(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def prose(text: str) -> str:
    """A page without its code blocks."""
    return re.sub(r"^    .*$", "", unfenced(text), flags=re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """What links can lead to on a page, as GitHub names its headings."""
    headings = re.findall(r"^#+ (.*)$", unfenced(path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def flags_of(command: str) -> set[str]:
    return {flag for param in COMMANDS[command].params for flag in (*param.opts, *param.secondary_opts)} | {"--help"}


def command_lines(text: str) -> Iterator[tuple[str, list[str]]]:
    """(subcommand, its flags) of each `rayllm` command on a page, continued lines joined."""
    for rest in re.findall(r"\brayllm ((?:[a-z]|-(?=[a-z]))+ [^`'\n]*)", text.replace("\\\n", " ")):
        name, _, arguments = rest.partition(" ")
        if name in COMMANDS and name != "bench":  # whose scripts read their own flags
            yield name, re.findall(r"(?<!\S)--[a-z][\w-]*", arguments)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_links_lead_somewhere(page):
    text = prose(page.read_text())
    for target in re.findall(r"\]\(\s*([^)\s]+)\)|^\[[^\]]+\]: (\S+)$", text, re.MULTILINE):
        name, _, anchor = "".join(target).partition("#")
        if "://" in name:
            continue
        path = page if not name else page.parent / name
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), target


@pytest.mark.parametrize("page", PAGES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_files_exist(page):
    """Paths from the project's folder; shorter ones are of what the page is about, below rayllm/ and others."""
    for name in re.findall(r"`([\w-]+/[\w./-]+)`", page.read_text()):
        if name.split("/")[0] in FOLDERS and name not in HISTORY:
            assert (ROOT / name).exists(), name
        elif name.endswith(".py"):
            bases = ("rayllm", "tests", "kernels", "kernels/rayllm_kernels", "tests/clients", "tests/support/own_model")
            assert any((ROOT / base / name).exists() for base in bases) or name in HISTORY, name


@pytest.mark.parametrize("page", PAGES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_commands_have_the_flags(page):
    text = page.read_text()
    for command, flags in command_lines(text):
        assert set(flags) <= flags_of(command), command
    if page in GUIDES and page.name not in ("clients.md", "performance.md"):  # which speak of other programs' flags
        known = set().union(*(flags_of(command) for command in COMMANDS)) | BENCHMARK_FLAGS | OTHERS_FLAGS
        assert set(re.findall(r"`(--[a-z][\w-]*)", prose(text))) <= known


def test_commands_are_found():
    page = (
        "`rayllm launch M --tp 4`, and\n    rayllm batch -i x \\\n      --replicas 2\n    rayllm bench serve --rate 1"
    )
    assert list(command_lines(page)) == [("launch", ["--tp"]), ("batch", ["--replicas"])]


def test_every_option_is_documented():
    text = "".join(page.read_text() for page in GUIDES)
    missing = [name for name in OPTIONS if not re.search(rf"\b({name}|{name.replace('_', '-')})\b", text)]
    assert not missing


@pytest.mark.parametrize(
    ("option", "page", "head"),
    [
        ("tool_call_parser", "chat.md", "| value | form of a call |"),
        ("reasoning_parser", "chat.md", "| value | reasoning is |"),
        ("quantization", "quantization.md", "| `--quantization` |"),
    ],
)
def test_every_choice_is_documented(option, page, head):
    table = (ROOT / "docs" / page).read_text().partition(f"\n{head}")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == set(get_args(OPTIONS[option].annotation))


def test_every_route_is_documented():
    declared = r'^\s*@?\w+\.(?:get|post|delete)\(\s*"(/[^"]*)"'
    files = (ROOT / "rayllm/serve/http").rglob("*.py")
    routes = {route for path in files for route in re.findall(declared, path.read_text(), re.MULTILINE)}
    hidden = {"/v1/responses/compact", "/console/{path:path}"}  # only refused; files of the page
    assert len(routes) > 20
    table = (ROOT / "docs/fields.md").read_text().partition("\n\nWhat `")[0]
    named = set(re.findall(r"`(/[^`]*)`", table))
    assert {route.replace(":path", "") for route in routes - hidden} <= named


def test_files_of_options_are_valid():
    blocks = re.findall(
        r"^    # rayllm launch --config .*\n((?:    .*\n)+)", (ROOT / "docs/operations.md").read_text(), re.M
    )
    assert blocks
    for block in blocks:
        check_names(yaml.safe_load(block))


def test_tests_of_the_security_rules_exist():
    table = (ROOT / "docs/operations.md").read_text().partition("## Security rules and their tests")[2]
    rules = [row for row in table.splitlines() if row.startswith("| ") and ".py`" in row]
    assert len(rules) > 15
    for row in rules:
        for file, tests in re.findall(r"`([\w/]+\.py)`(?:: ((?:`test_\w+`(?:, )?)+))?", row):
            functions = {getattr(node, "name", "") for node in ast.walk(ast.parse((ROOT / "tests" / file).read_text()))}
            assert set(re.findall(r"test_\w+", tests)) <= functions, file


@pytest.mark.parametrize("page", PAGES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_python_on_a_page_compiles(page):
    for code in re.findall(r"^```python.*?\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
        compile(code, page.name, "exec")


def test_the_map_has_every_package():
    table = (ROOT / "docs/architecture.md").read_text().partition("## Packages")[2].partition("\n## ")[0]
    for path in (ROOT / "rayllm").iterdir():
        if path.is_dir() and (path / "__init__.py").exists():
            inner = [f"{path.name}/{each.parent.name}" for each in path.glob("*/__init__.py")]
            assert f"`{path.name}/`" in table or all(f"`{each}/`" in table for each in inner), path.name
    kernels = (ROOT / "kernels/rayllm_kernels/__init__.py").read_text()
    (row,) = re.findall(r"^\| `kernels/rayllm_kernels/` .*$", table, re.MULTILINE)
    for path in (ROOT / "kernels/rayllm_kernels").glob("*/__init__.py"):
        assert re.search(rf"\b{path.parent.name}\b", row), path.parent.name
        assert re.search(rf"^{path.parent.name}/ ", kernels, re.MULTILINE), path.parent.name


def test_every_benchmark_is_listed():
    listed = re.findall(r"`(\w+\.py)`", (ROOT / "benchmarks/README.md").read_text())
    scripts = {path.name for path in (ROOT / "benchmarks").glob("*.py")} - {"__init__.py"}
    assert (set(listed), len(listed)) == (scripts, len(scripts))


def test_every_decision_is_listed():
    text = (ROOT / "docs/decisions/README.md").read_text()
    assert not [path.name for path in DECISIONS if path.name != "README.md" and f"]({path.name})" not in text]
