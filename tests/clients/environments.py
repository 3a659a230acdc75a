"""The environments in which clients of others are tested: their packages, their pinned versions, their tests.

A Python environment is a virtual environment under .venv-clients, made on first use from requirements/NAME.txt, which
pins every package, those that the clients depend on too. The Node environment is node/, by its package-lock.json.
`scripts/test-clients --raise` writes these files anew, with the newest versions that fit together.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TEST_TOOLS = ["pytest", "pytest-timeout"]
# Not with the other tests' conftest.py, which needs torch. Warnings are the clients' own.
PYTEST = ["-m", "pytest", f"--confcutdir={HERE}", "-p", "no:cacheprovider", "-rs", "--disable-warnings"]
PIP = ["-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input"]


@dataclasses.dataclass(frozen=True)
class PythonEnvironment:
    """Packages of PyPI in a virtual environment, and the files of tests that run there, beside test_docs.py.

    sees_ours: it also sees the packages of .venv, for its torch and transformers, and rayllm.
    """

    name: str
    packages: list[str]
    tests: list[str]
    sees_ours: bool = False

    @property
    def _pins(self) -> Path:
        return HERE / "requirements" / f"{self.name}.txt"

    @property
    def _folder(self) -> Path:
        return ROOT / ".venv-clients" / self.name

    def describe(self) -> str:
        """The versions of the packages that are asked for."""
        wanted = {package.partition("[")[0].rstrip("<>=0123456789.,") for package in self.packages}
        return " ".join(line for line in self._pins.read_text().split() if line.partition("==")[0] in wanted)

    def install(self) -> None:
        """Make the environment, or bring it up to date, if it is not what the pins say."""
        stamp, state = self._folder / "requirements", hashlib.sha256(self._pins.read_bytes()).hexdigest()
        if stamp.is_file() and stamp.read_text() == state:
            return
        print(f"test-clients: installing {self.name}", file=sys.stderr, flush=True)
        python = self._make(self._folder)
        subprocess.run([python, *PIP, "install", "-r", self._pins], check=True)
        stamp.write_text(state)

    def raise_versions(self) -> None:
        """Pin the newest versions that fit together."""
        with tempfile.TemporaryDirectory() as folder:
            python = self._make(Path(folder))
            resolve = [*PIP, "install", "--dry-run", "--report", "-", *TEST_TOOLS, *self.packages]
            report = subprocess.run([python, *resolve], check=True, stdout=subprocess.PIPE).stdout
        found = [each["metadata"] for each in json.loads(report)["install"]]
        pins = sorted(f"{each['name'].lower().replace('_', '-')}=={each['version']}\n" for each in found)
        self._pins.write_text("# Written by scripts/test-clients --raise\n" + "".join(pins))

    def test(self, url: str) -> bool:
        """Whether the tests pass against a server; those that are all skipped do not, as their client is there."""
        variables = os.environ | {"RAYLLM_TEST_URL": url, "RAYLLM_TEST_ENVIRONMENT": self.name}
        python = self._folder / "bin" / "python"
        # A process a file, as pytest fails if nothing in it ran.
        codes = [
            subprocess.run([python, *PYTEST, HERE / test], env=variables, cwd=ROOT).returncode
            for test in [*self.tests, "test_docs.py"]
        ]
        return not any(codes)

    def _make(self, folder: Path) -> Path:
        """An environment without packages; returns its interpreter."""
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        if self.sees_ours:
            packages = next((folder / "lib").glob("python*/site-packages"))
            # Ours too, whose own .pth file there is not read from here.
            (packages / "ours.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT}\n")
        return folder / "bin" / "python"


@dataclasses.dataclass(frozen=True)
class NodeEnvironment:
    """Packages of npm in node/, whose tests run under Node's own test runner."""

    name: str = "node"

    def describe(self) -> str:
        """The versions of the packages that are asked for."""
        packages = json.loads((HERE / "node" / "package.json").read_text())["dependencies"]
        return " ".join(f"{name}@{version}" for name, version in packages.items())

    def install(self) -> None:
        """Make node_modules, or bring it up to date, if it is not what package-lock.json says."""
        folder = HERE / "node"
        stamp = folder / "node_modules" / "requirements"
        state = hashlib.sha256((folder / "package-lock.json").read_bytes()).hexdigest()
        if stamp.is_file() and stamp.read_text() == state:
            return
        if shutil.which("npm") is None:
            sys.exit("error: the environment node needs Node.js 20 or later with npm")
        print("test-clients: installing node", file=sys.stderr, flush=True)
        subprocess.run(["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"], cwd=folder, check=True)
        stamp.write_text(state)

    def raise_versions(self) -> None:
        """Pin the newest versions."""
        packages = json.loads((HERE / "node" / "package.json").read_text())["dependencies"]
        newest = [f"{name}@latest" for name in packages]
        options = ["--save-exact", "--package-lock-only", "--no-audit", "--no-fund", "--ignore-scripts"]
        subprocess.run(["npm", "install", *options, *newest], cwd=HERE / "node", check=True)

    def test(self, url: str) -> bool:
        """Whether the tests pass against a server."""
        variables = os.environ | {"RAYLLM_TEST_URL": url}
        files = sorted((HERE / "node").glob("*.test.mjs"))
        return subprocess.run(["node", "--test", *files], env=variables, cwd=ROOT).returncode == 0


# guidellm depends on torch and transformers, which also compute what lm-eval should find.
ENVIRONMENTS: dict[str, PythonEnvironment | NodeEnvironment] = {
    each.name: each
    for each in (
        PythonEnvironment("openai2", ["openai<3"], ["test_openai.py"]),
        PythonEnvironment("openai3", ["openai>=3"], ["test_openai.py"]),
        PythonEnvironment("langchain", ["langchain", "langchain-openai"], ["test_langchain.py"]),
        PythonEnvironment("litellm", ["litellm[proxy]"], ["test_litellm.py"]),
        PythonEnvironment("llamaindex", ["llama-index-llms-openai-like"], ["test_llamaindex.py"]),
        PythonEnvironment("instructor", ["instructor"], ["test_instructor.py"]),
        PythonEnvironment("pydantic-ai", ["pydantic-ai-slim[openai,anthropic]"], ["test_pydantic_ai.py"]),
        PythonEnvironment("llm", ["llm"], ["test_llm_command.py"]),
        PythonEnvironment("dspy", ["dspy"], ["test_dspy.py"]),
        NodeEnvironment(),
        PythonEnvironment("lm-eval", ["lm-eval[api]"], ["test_lm_eval.py"], sees_ours=True),
        PythonEnvironment("guidellm", ["guidellm"], ["test_guidellm.py"], sees_ours=True),
        PythonEnvironment("aiperf", ["aiperf"], ["test_aiperf.py"]),
        PythonEnvironment("schemathesis", ["schemathesis"], ["test_schemathesis.py"]),
        PythonEnvironment("openai-agents", ["openai-agents"], ["test_openai_agents.py"]),
        PythonEnvironment("anthropic", ["anthropic"], ["test_anthropic.py", "test_anthropic_agents.py"]),
    )
}
