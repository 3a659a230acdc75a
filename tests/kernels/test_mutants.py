"""The tests of kernels notice mistakes: each of `support.mutants` is made in a copy, and has to fail a test.

A few of them here, all of them with `--full-matrix`. Gluon's kernels have no interpreter, so GPUs alone test those.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from support import mutants

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="the copies run in the interpreter")
QUICK = 70  # every so many


@pytest.mark.timeout(3600)
def test_every_mistake_is_noticed(full_matrix):
    numbers = range(0, len(mutants.MUTANTS), 1 if full_matrix else QUICK)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, mutants.__file__, *map(str, numbers)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    outcomes = [json.loads(line) for line in result.stdout.splitlines()]
    assert [outcome["number"] for outcome in outcomes] == list(numbers)
    for outcome in outcomes:
        # 1: a test failed. 0: all passed. Others: the mistake keeps tests from running at all, and shows nothing.
        assert outcome["code"] == 1, (mutants.MUTANTS[outcome["number"]], outcome["output"])


def test_every_mistake_has_its_place():
    """In the kernels as they are now, also those that are made with `--full-matrix` alone."""
    for mutant in mutants.MUTANTS:
        assert mutants.mutated(mutant) != (mutants.KERNELS / mutant.file).read_text(), mutant
    with pytest.raises(ValueError, match="0 times"):
        mutants.mutated(mutants.MUTANTS[0]._replace(code="no kernel has this"))
