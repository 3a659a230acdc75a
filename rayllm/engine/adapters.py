"""`EngineAdapters`: the adapters of one engine by name: which are there, which go, and which new workers still lack."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

from rayllm.api.types import Adapter
from rayllm.config.lora import adapter_digest, naming_adapter, read_lora_config
from rayllm.config.options import EngineConfig, check_adapter_name
from rayllm.core.adapter_slots import AdapterSlots
from rayllm.errors import InvalidRequestError
from rayllm.executor.base import Executor

logger = logging.getLogger(__name__)


class PreparedAdapter(NamedTuple):
    """An adapter that the workers have read. workers: how often there had been new ones before."""

    adapter: Adapter
    workers: int


class EngineAdapters:
    """Only `prepare` may be called on other threads than the engine's.

    slots: the scheduler's. on_ready: called on another thread when `take_ready` has something to do.
    """

    def __init__(self, options: EngineConfig, executor: Executor, slots: AdapterSlots, on_ready: Callable[[], None]):
        self._enabled, self._limit = options.enable_lora, options.max_cpu_loras
        self._executor, self._slots, self._on_ready = executor, slots, on_ready
        self._ids = itertools.count()
        self._by_name: dict[str, Adapter] = {}
        self._leaving: dict[int, Adapter] = {}  # unloaded, while requests have them
        self._lock = threading.Lock()  # of `prepare`
        self._prepared: set[int] = set()  # ids of those that `add` has not taken yet
        self._thread = ThreadPoolExecutor(1, "adapters")
        self._workers = 0  # how often there were new workers
        self._coming: dict[Future[None], Adapter] = {}  # those that new workers read

    @property
    def names(self) -> list[str]:
        """Of those that requests may ask for."""
        return list(self._by_name)

    @property
    def is_loading(self) -> bool:
        """Whether new workers still lack adapters."""
        return bool(self._coming)

    @property
    def is_ready(self) -> bool:
        """Whether `take_ready` has something to do."""
        return any(future.done() for future in list(self._coming))

    def id_of(self, name: str) -> int | None:
        """The adapter that a request asks for; None for no name. Raises InvalidRequestError."""
        if not name:
            return None
        if name not in self._by_name:
            raise InvalidRequestError(f"the adapter {name!r} is not loaded", "model")
        return self._by_name[name].id

    def prepare(self, name: str, path: str) -> PreparedAdapter:
        """Have all workers read an adapter: what `add` takes. Blocks; the engine goes on meanwhile.

        Raises InvalidRequestError, and ModelError for a folder that cannot be served.
        """
        if not self._enabled:
            raise InvalidRequestError("adapters need the option enable_lora", "lora_name")
        try:
            check_adapter_name(name)
        except ValueError as error:
            raise InvalidRequestError(f"lora_name: {error}", "lora_name") from None
        with self._lock:
            if name in self._by_name:
                raise InvalidRequestError(f"an adapter {name!r} is loaded already; unload it first", "lora_name")
            if len(self._by_name) + len(self._leaving) + len(self._prepared) >= self._limit:
                raise InvalidRequestError(
                    f"{self._limit} adapters are loaded, as many as max_cpu_loras allows; unload one first", "lora_name"
                )
            read_lora_config(path)
            adapter, workers = Adapter(next(self._ids), name, path, adapter_digest(path)), self._workers
            self._executor.load_adapter(adapter)
            self._prepared.add(adapter.id)
            return PreparedAdapter(adapter, workers)

    def add(self, adapter: Adapter, workers: int) -> None:
        """Let requests ask for an adapter that was prepared. Raises InvalidRequestError."""
        self._prepared.discard(adapter.id)
        if adapter.name in self._by_name:  # another one came first
            self._slots.forget(adapter.id)
            raise InvalidRequestError(f"an adapter {adapter.name!r} is loaded already; unload it first", "lora_name")
        self._by_name[adapter.name] = adapter
        if workers == self._workers:
            self._slots.loaded.add(adapter.id)
        else:
            self._read_again(adapter)

    def remove(self, name: str) -> None:
        """No request may ask for it any more. Raises InvalidRequestError if none could."""
        if name not in self._by_name:
            raise InvalidRequestError(f"no adapter {name!r} is loaded", "lora_name")
        adapter = self._by_name.pop(name)
        self._leaving[adapter.id] = adapter

    def drop_unused(self, used: Callable[[], set[int | None]], *, idle: bool) -> None:
        """Forget adapters that were removed and that no request has. used: the ids of those that one has.

        idle: no plan is in flight, and perhaps none comes for long, with which the workers would hear of it.
        """
        if self._leaving:
            for adapter_id in self._leaving.keys() - used():
                del self._leaving[adapter_id]
                self._slots.forget(adapter_id)
        if idle:
            drops, self._slots.drops = self._slots.drops, []
            for adapter_id in drops:
                self._executor.drop_adapter(adapter_id)

    def restart(self) -> None:
        """There are new workers, which have no adapters yet: they read them, and requests that have one wait."""
        self._workers += 1
        self._slots.loaded.clear()
        self._coming = {}
        for adapter in [*self._leaving.values(), *self._by_name.values()]:
            self._read_again(adapter)

    def take_ready(self) -> set[int]:
        """Let requests go on whose adapters new workers have read; the ids of those that could not be read again."""
        lost: set[int] = set()
        for future, adapter in list(self._coming.items()):
            if not future.done():
                continue
            del self._coming[future]
            if (error := future.exception()) is None:
                if self._by_name.get(adapter.name) is adapter or adapter.id in self._leaving:
                    self._slots.loaded.add(adapter.id)
                else:  # removed meanwhile: the plan that said so may have come before the workers had it
                    self._slots.forget(adapter.id)
                continue
            logger.error("adapter %s is lost: new workers cannot read it: %s", adapter.name, error)
            lost.add(adapter.id)
            self._leaving.pop(adapter.id, None)
            if self._by_name.get(adapter.name) is adapter:
                del self._by_name[adapter.name]
        return lost

    def wait(self, seconds: float) -> None:
        """Until something is ready, at most so long."""
        wait(list(self._coming), seconds, return_when="FIRST_COMPLETED")

    def close(self) -> None:
        """Read nothing any more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _read_again(self, adapter: Adapter) -> None:
        future = self._thread.submit(self._executor.load_adapter, adapter)
        self._coming[future] = adapter
        future.add_done_callback(lambda _: self._on_ready())


def load_adapters(modules: dict[str, str], adapters: EngineAdapters) -> None:
    """Load the adapters of the option lora_modules. Raises ModelError."""
    for name, path in modules.items():
        with naming_adapter(name):
            adapters.add(*adapters.prepare(name, path))
