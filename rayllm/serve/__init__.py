"""Serving over HTTP. `build_app` builds the application for Ray Serve: `serve run rayllm.serve:build_app model=...`."""

from __future__ import annotations

from typing import Any


def build_app(args: dict[str, Any]) -> Any:
    """See `rayllm.serve.cluster.application.build_app`. Ray Serve is imported only when it is called."""
    from rayllm.serve.cluster.application import build_app

    return build_app(args)
