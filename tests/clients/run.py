"""scripts/test-clients: makes the clients' environments, starts one server from .venv, runs each client's tests."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from clients.environments import ENVIRONMENTS
from clients.live import serving

FUZZ_CASES = "2000"


def main(arguments: list[str]) -> int:
    """Returns how many environments' tests failed."""
    names = [each for each in arguments if each != "--raise"] or list(ENVIRONMENTS)
    if unknown := set(names) - ENVIRONMENTS.keys():
        sys.exit(f"error: no environment {', '.join(sorted(unknown))}; there are {', '.join(ENVIRONMENTS)}")
    environments = [ENVIRONMENTS[name] for name in names]
    if "--raise" in arguments:
        for each in environments:
            print(f"test-clients: raising {each.name}", file=sys.stderr, flush=True)
            each.raise_versions()
            print(each.describe(), file=sys.stderr, flush=True)
    for each in environments:
        each.install()
    os.environ.setdefault("RAYLLM_FUZZ_CASES", FUZZ_CASES)
    failed = []
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as url:
        for each in environments:
            print(f"\n== {each.name}: {each.describe()}", flush=True)
            if not each.test(url):
                failed.append(each.name)
    print(f"\nfailed: {', '.join(failed)}" if failed else "\nall passed")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
