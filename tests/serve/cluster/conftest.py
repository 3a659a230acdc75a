"""Fixtures of all tests of replicas and API servers."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(autouse=True)
def _own_switch_interval():
    """A replica sets that of its process, which is the tests' here."""
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)
