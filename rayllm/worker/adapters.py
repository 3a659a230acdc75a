"""`AdapterStore`: the adapters that one rank has in host memory, and their way into the slots of the model."""

from __future__ import annotations

import threading

import torch

from rayllm.api.types import Adapter, StepPlan
from rayllm.models.adapter_weights import ProjectionMatrices, read_adapter
from rayllm.models.base import CausalLM


class AdapterStore:
    """Adapters by their ids. `load` and `drop` may be called on other threads than `put`, while steps run."""

    def __init__(self, model: CausalLM):
        self._model = model
        self._host: dict[int, list[ProjectionMatrices]] = {}
        self._lock = threading.Lock()

    def load(self, adapter: Adapter) -> None:
        """Read an adapter into host memory. One that is there stays. Raises ModelError."""
        with self._lock:
            known = adapter.id in self._host
        if not known:
            read = read_adapter(self._model, adapter.path, adapter.digest)
            with self._lock:
                self._host[adapter.id] = read

    def drop(self, adapter_id: int) -> None:
        """Forget an adapter. No later plan names it; copies of it that are on their way have been made by then."""
        with self._lock:
            self._host.pop(adapter_id, None)

    def apply(self, plan: StepPlan) -> None:
        """Forget and put into slots what a plan says."""
        for adapter_id in plan.dropped_adapters:
            self.drop(adapter_id)
        for slot, adapter_id in plan.adapters:
            self.put(slot, adapter_id)

    @torch.inference_mode()
    def put(self, slot: int, adapter_id: int) -> None:
        """Copy an adapter into a slot of the device, in the order of the stream, without waiting for it."""
        with self._lock:
            adapter = self._host[adapter_id]
        for projection, matrices, ranks in adapter:
            projection.put(slot, matrices, ranks)
