"""The steps that the tests of these kernels are about."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import triton.language as tl
from support.states import StateCase, make_state_case
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


@pytest.fixture
def state_case(randn: Callable[..., Tensor]) -> Callable[..., StateCase]:
    """`make_state_case` with seeded numbers."""
    return partial(make_state_case, randn)


@pytest.fixture(autouse=True)
def products_of_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies numbers of bf16 as what their bits are as integers: here as numbers."""
    multiply = InterpreterBuilder.create_dot

    def create_dot(self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, *rest: Any) -> TensorHandle:
        wide = (self.create_fp_ext(each, tl.float32) if each.dtype.scalar == tl.bfloat16 else each for each in (a, b))
        return multiply(self, *wide, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
