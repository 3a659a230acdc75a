"""One live server for all tests of clients: the one at RAYLLM_TEST_URL, else one that is started here.

Imports nothing but pytest at the top: the environments of scripts/test-clients lack rayllm.
"""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session")
def url(tmp_path_factory) -> str:
    """Of the server, without /v1."""
    given = os.environ.get("RAYLLM_TEST_URL")
    if given:
        yield given
        return
    from clients.live import serving

    with serving(tmp_path_factory.mktemp("server")) as started:
        yield started
