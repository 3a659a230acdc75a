"""What the routes know of the models that a server has, and which of them a request is for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from rayllm.api.types import EngineStats
from rayllm.config.options import ServerConfig
from rayllm.errors import EngineDeadError
from rayllm.serve.http.errors import ApiError
from rayllm.serve.http.fanout import Engine
from rayllm.serve.http.limits import Admission
from rayllm.serve.http.metrics import FrontMetrics


class ServedModel(Protocol):
    """One model, as the routes need it. name: in the API. metrics: this server's own figures. admission: its load."""

    name: str
    server: ServerConfig
    metrics: FrontMetrics
    admission: Admission

    def engine(self) -> Engine:
        """The engine to use now. Raises EngineDeadError while there is none."""
        ...

    @property
    def num_replicas(self) -> int:
        """How many engines there are for new requests."""
        ...

    async def unhealthy_reason(self) -> str | None:
        """None if requests are being answered, else why not."""
        ...

    async def all_metrics(self) -> FrontMetrics:
        """The figures of all servers of the deployment."""
        ...

    async def stats(self) -> dict[str, EngineStats]:
        """The figures of the engines that answer, by their names."""
        ...


class ServerState(Protocol):
    """What the routes need to know. models: by their names, at least one."""

    @property
    def models(self) -> Mapping[str, ServedModel]: ...

    @property
    def door(self) -> Admission:
        """Where a request counts until its model is known."""
        ...


def require_engine(state: ServerState) -> None:
    """Raises EngineDeadError if no model has an engine."""
    models = list(state.models.values())
    for model in models:
        try:
            model.engine()
            return
        except EngineDeadError:
            if model is models[-1]:
                raise


def find_model(state: ServerState, name: str | None) -> ServedModel:
    """The model that a request asks for; it may leave the name out if there is only one. Raises ApiError."""
    models = state.models
    if name is None and len(models) == 1:
        return next(iter(models.values()))
    known = ", ".join(map(repr, models))
    if name is None:
        raise ApiError(400, f"model is missing; this server has {known}", param="model")
    if name not in models:
        message = f"the model {name!r} does not exist; this server has {known}"
        raise ApiError(404, message, param="model", code="model_not_found")
    return models[name]
