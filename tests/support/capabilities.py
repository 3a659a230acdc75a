"""Tests of what not every GPU can do; on the CPU, in Triton's interpreter, everything can be done."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from rayllm_kernels.device import hardware

HERE = hardware(torch.device("cuda" if torch.cuda.is_available() else "cpu"))  # where tests of kernels run
needs_e4m3 = pytest.mark.skipif(not HERE.has_e4m3, reason="needs a GPU that converts and multiplies e4m3")


def each_where_it_can_run(cases: Iterable[Any]) -> list[Any]:
    """Arguments of tests, of which those with e4m3 among them are skipped where there is none."""
    found = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        found.append(pytest.param(*values, marks=needs_e4m3 if torch.float8_e4m3fn in values else ()))
    return found
