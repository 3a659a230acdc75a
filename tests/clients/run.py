"""scripts/test-clients: makes the clients' environments, starts one server from .venv, runs each client's tests.

A file whose tests are skipped counts as a failure here: its client should have been installed.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE.parent))

from clients.live import serving  # noqa: E402  (found by the line above)

REQUIREMENTS = HERE / "requirements"
# Environment -> its tests.
SUITES = {
    "openai2": ["test_openai.py"],
    "openai3": ["test_openai.py"],
    "langchain": ["test_langchain.py", "test_litellm.py"],
    "lm-eval": ["test_lm_eval.py"],
    "guidellm": ["test_guidellm.py"],
    "schemathesis": ["test_schemathesis.py"],
}
# Environments that also see the packages of .venv, for its torch and transformers: guidellm depends on both, and they
# compute what lm-eval should find.
WITH_OURS = {"lm-eval", "guidellm"}
# Not with the other tests' conftest.py, which needs torch. Warnings are the clients' own.
PYTEST = ["-m", "pytest", f"--confcutdir={HERE}", "-p", "no:cacheprovider", "-rs", "--disable-warnings"]
FUZZ_CASES = "2000"


def environment(name: str) -> Path:
    """The interpreter of a client's environment, which is made or brought up to date if need be."""
    folder = ROOT / ".venv-clients" / name
    python, stamp, wanted = folder / "bin" / "python", folder / "requirements", REQUIREMENTS / f"{name}.txt"
    state = hashlib.sha256(wanted.read_bytes()).hexdigest()
    if stamp.is_file() and stamp.read_text() == state:
        return python
    print(f"test-clients: installing {name}", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    if name in WITH_OURS:
        packages = next((folder / "lib").glob("python*/site-packages"))
        (packages / "ours.pth").write_text(sysconfig.get_path("purelib"))
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    subprocess.run([*install, "-r", wanted], check=True)
    stamp.write_text(state)
    return python


def main(names: list[str]) -> int:
    """Returns how many environments' tests failed."""
    if unknown := set(names) - SUITES.keys():
        sys.exit(f"error: no environment {', '.join(sorted(unknown))}; there are {', '.join(SUITES)}")
    pythons = {name: environment(name) for name in names or SUITES}
    failed = []
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as url:
        for name, python in pythons.items():
            print(f"\n== {name}: {' '.join((REQUIREMENTS / f'{name}.txt').read_text().split())}", flush=True)
            variables = {"RAYLLM_FUZZ_CASES": FUZZ_CASES} | os.environ | {"RAYLLM_TEST_URL": url}
            # A process a file, as pytest fails if nothing in it ran.
            codes = [
                subprocess.run([python, *PYTEST, HERE / test], env=variables, cwd=ROOT).returncode
                for test in SUITES[name]
            ]
            if any(codes):
                failed.append(name)
    print(f"\nfailed: {', '.join(failed)}" if failed else "\nall passed")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
