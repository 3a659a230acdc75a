"""The steps that the tests of these kernels are about."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from support.states import StateCase, make_state_case
from torch import Tensor


@pytest.fixture
def state_case(randn: Callable[..., Tensor]) -> Callable[..., StateCase]:
    """`make_state_case` with seeded numbers."""
    return partial(make_state_case, randn)
