"""Serving over HTTP. `build_app` builds the application for Ray Serve: `serve run rayllm.serve:build_app model=...`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray import serve


def build_app(args: dict[str, Any]) -> serve.Application:
    """See `rayllm.serve.cluster.application.build_app`."""
    from rayllm.serve.cluster.application import build_app

    return build_app(args)
