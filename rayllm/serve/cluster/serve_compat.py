"""What Ray Serve has no public call for. tests/serve/cluster/test_serve_compat.py fails when one of these changes.

pyproject.toml allows no version of Ray that these were not tried with.
"""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve.config import HTTPOptions
from ray.serve.context import _get_global_client


def with_version(deployment: serve.Deployment, version: str) -> serve.Deployment:
    """The deployment with a version: Serve replaces the replicas of another one.

    Left to itself, Serve replaces every replica of an application whenever it is deployed again.
    """
    return deployment.options(version=version, _internal=True)


def serve_http_options() -> HTTPOptions:
    """Those of the Serve that runs."""
    client: Any = _get_global_client()
    return client.http_config
