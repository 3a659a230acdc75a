"""What the app needs of the cluster that hosts it: the models and their engines."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Mapping
from typing import NamedTuple, Protocol

from rayllm.api.types import EngineInfo, EngineStats, GenerationRequest, IdempotencyKey, RequestOutput
from rayllm.config.options import ServerConfig
from rayllm.serve.http.jobs import Jobs
from rayllm.serve.http.limits import Admission
from rayllm.serve.http.metrics import FrontMetrics
from rayllm.serve.http.responses.store import ResponseStore
from rayllm.text.tokenizer import Tokenizer


class Engine(Protocol):
    """What the routes use of a model's engines; `rayllm.engine.async_engine.AsyncEngine` has it too."""

    @property
    def info(self) -> EngineInfo: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...
    def generate(
        self, request: GenerationRequest, prompt_text: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]: ...
    def forget(self, key_id: str) -> None: ...


class ServedModel(Protocol):
    """One model."""

    name: str  # in the API
    server: ServerConfig
    metrics: FrontMetrics  # this server's own
    admission: Admission  # this server's load of the model

    def engine(self) -> Engine:
        """The engine to use now. Raises EngineDeadError while there is none."""

    @property
    def num_replicas(self) -> int:
        """How many engines there are for new requests; `engine` raises only if it is none."""

    @property
    def adapters(self) -> Collection[str]:
        """The names of its adapters, by which requests may ask for them in place of the model's."""

    async def load_adapter(self, name: str, path: str) -> None:
        """Have all engines load an adapter. Raises InvalidRequestError if one cannot; then none has it."""

    async def unload_adapter(self, name: str) -> None:
        """Have all engines forget an adapter. Raises InvalidRequestError."""

    async def unhealthy_reason(self) -> str | None:
        """None if requests are being answered, else why not."""

    def peer_metrics(self) -> list[dict[str, float]]:
        """`FrontMetrics.figures` of the deployment's other servers, as last heard."""

    async def stats(self) -> Mapping[str, EngineStats]:
        """The figures of the engines that answer, by the value of their label `engine`."""


class ServerState(Protocol):
    """All models of a server."""

    @property
    def models(self) -> Mapping[str, ServedModel]:
        """By their names, at least one."""

    @property
    def response_store(self) -> ResponseStore:
        """Where responses are stored."""

    @property
    def jobs(self) -> Jobs:
        """What runs without a connection."""

    @property
    def door(self) -> Admission:
        """Where a request counts until its model is known."""

    async def describe_cluster(self) -> list[str]:
        """Lines about hosts, replicas, loads, drains and recoveries."""

    async def cluster_json(self) -> bytes:
        """The same as a JSON object."""


class Target(NamedTuple):
    """The model and the engine that a request goes to."""

    model: ServedModel
    engine: Engine
    info: EngineInfo
    reply_id: str
    client: str = ""  # who asks, as far as it is known
    key: IdempotencyKey | None = None  # of a request that may be sent again
    adapter: str = ""  # the name of the adapter that was asked for

    @property
    def name(self) -> str:
        """What was asked for: the adapter or the model."""
        return self.adapter or self.model.name
