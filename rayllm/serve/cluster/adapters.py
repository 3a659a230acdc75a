"""Adapters that come and go while a deployment runs: the same on all engines of a model, and known to all API servers.

What is to be there is written in the directory, as `LoraRecord`s. Every engine of the model, also one that starts
later, loads what it reads there, and says of itself what it has or why it cannot have it. The API server that was asked
waits for all engines: if one cannot load the adapter, the record says that it goes, and none has it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import msgspec

from rayllm import timeouts
from rayllm.errors import EngineDeadError, InvalidRequestError, ModelError, RayllmError
from rayllm.executor.checkpoints import fetch_adapter
from rayllm.serve.cluster.directory import EngineMember, LoraRecord, View, adapters_known

POLL_S = timeouts.REGISTER_S / 10

logger = logging.getLogger("ray.serve")


class AdapterDriver(Protocol):
    """What `ReplicaAdapters` needs of an `EngineDriver`. Both calls block."""

    def load_adapter(self, name: str, path: str) -> None: ...
    def unload_adapter(self, name: str) -> None: ...


# (an adapter's folder, Ray's ids of nodes that have it): brings the folder here if it lacks. Blocks.
Fetch = Callable[[str, Sequence[str]], object]


class Deciding(Protocol):
    """What `FrontAdapters` needs of a `DirectoryLink`. The call blocks."""

    def decide(self, records: list[LoraRecord]) -> None: ...


class ReplicaAdapters:
    """Keeps the adapters of one engine as the directory has them.

    at_start: the names of those that it has from its options. versions, errors: as `EngineMember` has them.
    """

    def __init__(self, model: str, driver: AdapterDriver, at_start: Iterable[str], fetch: Fetch = fetch_adapter):
        self._model, self._driver, self._fetch = model, driver, fetch
        self.versions: dict[str, int] = dict.fromkeys(at_start, 0)
        self.errors: dict[int, str] = {}
        self._working: asyncio.Task[None] | None = None
        # Those that the directory had first are here, or cannot be: before that requests for them would be refused.
        self.have_begun = False
        self._records: list[LoraRecord] = []
        self._engines: list[EngineMember] = []
        self._launches: list[str] = []  # Ray's ids of their nodes

    def update(self, view: View) -> None:
        """Take in what the directory has; what there is to do is done beside."""
        self._records = [record for record in view.adapters or [] if record.model == self._model]
        self._engines = [engine for engine in view.engines if engine.model == self._model]
        self._launches = [launch.node_id for launch in view.launches]
        wanted = {record.version for record in self._records if record.path}
        self.errors = {version: reason for version, reason in self.errors.items() if version in wanted}
        if self._next() is None:
            self.have_begun = True
        elif self._working is None or self._working.done():
            self._working = asyncio.create_task(self._work())

    def _next(self) -> LoraRecord | None:
        """One that is not as it should be yet."""
        for record in self._records:
            wanted = record.version if record.path and record.version not in self.errors else None
            if self.versions.get(record.name) != wanted:
                return record
        return None

    async def _work(self) -> None:
        while (record := self._next()) is not None:
            name = record.name
            try:
                if name in self.versions:
                    await asyncio.to_thread(self._driver.unload_adapter, name)
                    self.versions = {each: version for each, version in self.versions.items() if each != name}
                if record.path and record.version not in self.errors:
                    others = [each.node_id for each in self._engines if each.adapters.get(name) == record.version]
                    may_have_it = [record.node_id, *self._launches, *others]
                    await asyncio.to_thread(self._fetch, record.path, may_have_it)
                    await asyncio.to_thread(self._driver.load_adapter, name, record.path)
                    self.versions = self.versions | {name: record.version}
            except EngineDeadError:
                return  # with all that it had
            except Exception as error:
                reason = str(error) if isinstance(error, RayllmError) else f"{type(error).__name__}: {error}"
                logger.warning("the adapter %s cannot be loaded: %s", name, reason)
                self.versions = {each: version for each, version in self.versions.items() if each != name}
                self.errors = self.errors | {record.version: reason}


class FrontAdapters:
    """The adapters of one model, as an API server knows them.

    at_start: the names and paths of those that all engines have from their options. directory: where changes are
    written. node_id: Ray's id of this node. find: the folder of a path or of a name on the hub, see `local_adapter`.
    """

    def __init__(
        self,
        model: str,
        enabled: bool,
        at_start: Mapping[str, str],
        directory: Deciding | None,
        node_id: str = "",
        find: Callable[[str], str] = str,
    ):
        self._model, self._enabled, self._directory = model, enabled, directory
        self._node_id, self._find = node_id, find
        self._at_start = dict(at_start)
        self._records: dict[str, LoraRecord] = {}
        self._view: View | None = None
        # What requests may ask for, and which of an adapter's versions they get.
        self.versions: dict[str, int] = dict.fromkeys(at_start, 0)

    def update(self, view: View) -> None:
        """Take in what the directory has."""
        self._view = view
        self._records = {each.name: each for each in view.adapters or [] if each.model == self._model}
        ready = {name: each.version for name, each in self._records.items() if each.is_ready and each.path}
        at_start = {name: 0 for name in self._at_start if name not in self._records}
        self.versions = at_start | ready

    async def load(self, name: str, path: str) -> None:
        """Return when all engines have the adapter and all API servers know it.

        path: of its folder, on this host, on that of `rayllm launch` or on those of all engines, or a name on the hub.
        Raises InvalidRequestError, also if an engine cannot load it; then none has it.
        """
        directory = self._check()
        self._check_new(name)
        try:
            folder = await asyncio.to_thread(self._find, path)
        except ModelError as error:
            raise InvalidRequestError(f"lora_path: {error}", "lora_path") from None
        if not os.path.isabs(folder):
            raise InvalidRequestError(
                "lora_path must be the absolute path of a folder, or a name on the hub, as org/name", "lora_path"
            )
        self._check_new(name)
        now = self._now()
        record = LoraRecord(self._model, name, folder, self._node_id, version=now, changed=now)
        try:
            await asyncio.to_thread(directory.decide, [record])
            await self._wait_for_engines(record)
            ready = msgspec.structs.replace(record, changed=self._now(), is_ready=True)
            await asyncio.to_thread(directory.decide, [ready])
        except BaseException:
            gone = msgspec.structs.replace(record, path="", changed=self._now())
            await asyncio.shield(asyncio.to_thread(directory.decide, [gone]))
            raise
        await self._wait_for_servers(ready)
        self._check_holds(ready)

    async def unload(self, name: str) -> None:
        """Return when no request can ask for the adapter any more. Raises InvalidRequestError."""
        directory = self._check()
        if name not in self.versions:
            raise InvalidRequestError(f"no adapter {name!r} is loaded", "lora_name")
        now = self._now()
        gone = LoraRecord(self._model, name, "", "", version=now, changed=now)
        await asyncio.to_thread(directory.decide, [gone])
        await self._wait_for_servers(gone)

    def _now(self) -> int:
        """For `LoraRecord`s: later than all that is known, whatever the clocks of their hosts said."""
        known = 0 if self._view is None else adapters_known(self._view)
        return max(time.time_ns(), known + 1)

    def _check_new(self, name: str) -> None:
        if name in self.versions:
            raise InvalidRequestError(f"an adapter {name!r} is loaded already; unload it first", "lora_name")

    def _check(self) -> Deciding:
        if not self._enabled or self._directory is None:
            raise InvalidRequestError(f"adapters of {self._model} need the option enable_lora", "lora_name")
        return self._directory

    def _engines(self) -> list[EngineMember]:
        engines = [] if self._view is None else self._view.engines
        return [engine for engine in engines if engine.model == self._model and not engine.draining]

    async def _wait_for_engines(self, record: LoraRecord) -> None:
        """Until all have the adapter. Raises InvalidRequestError if one cannot have it, or not in time."""
        deadline = time.monotonic() + timeouts.ADAPTER_S
        while True:
            self._check_holds(record)
            known, engines = self._records.get(record.name), self._engines()
            for engine in engines:
                if (reason := engine.adapter_errors.get(record.version)) is not None:
                    raise InvalidRequestError(f"an engine cannot load it: {reason}", "lora_path")
            if known == record and engines and all(e.adapters.get(record.name) == record.version for e in engines):
                return
            if time.monotonic() > deadline:
                seconds = timeouts.ADAPTER_S
                raise InvalidRequestError(f"not all engines have loaded it within {seconds:g} s", "lora_path")
            await asyncio.sleep(POLL_S)

    async def _wait_for_servers(self, record: LoraRecord) -> None:
        """Until all API servers know what was decided, or that it was replaced; a slow one is not waited for long."""
        deadline = time.monotonic() + timeouts.MEMBER_SILENCE_S
        while time.monotonic() < deadline:
            if self._is_replaced(record):
                return
            view = self._view
            servers = [] if view is None else [s for s in view.servers if self._model in s.models and not s.draining]
            here = 0 if view is None else adapters_known(view)
            if min([here, *(server.adapters_known for server in servers)]) >= record.changed:
                return
            await asyncio.sleep(POLL_S)

    def _check_holds(self, record: LoraRecord) -> None:
        if self._is_replaced(record):
            raise InvalidRequestError(f"another request has changed the adapter {record.name!r}", "lora_name")

    def _is_replaced(self, record: LoraRecord) -> bool:
        known = self._records.get(record.name)
        return known is not None and known.version > record.version
