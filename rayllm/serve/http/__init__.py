"""The HTTP API as a FastAPI app, which knows nothing of Ray: routes, bodies, answers, limits and metrics."""
