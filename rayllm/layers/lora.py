"""Adapters of projections: their slots in device memory, and the step that is computed with them.

A model that is built with an `AdapterState` gives each of its projections slots for the weights of `max_loras`
adapters. Which slot a token uses comes with the batch; layers ask the state for it, because they see tokens only. A
step without any adapter computes what a model without slots computes, by the same kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from rayllm_kernels import ops


class AdapterState:
    """The adapters' part of one rank's model: how many slots, of which rank, and what the step has of them.

    max_loras, max_rank: adapters that fit on the device, and the largest rank of one.
    """

    def __init__(self, max_loras: int, max_rank: int):
        self.max_loras, self.max_rank = max_loras, max_rank
        self.is_idle = True  # no token of the step has an adapter
        self._slots: torch.Tensor | None = None
        self._logit_slots: torch.Tensor | None = None

    def begin(self, slots: torch.Tensor | None, logit_rows: torch.Tensor | None) -> None:
        """A step begins. slots: [T] int32, of its tokens, -1 for none; None if no token has one. logit_rows: as of the
        batch; a model may go on with these tokens alone.
        """
        self.is_idle = slots is None
        self._slots, self._logit_slots = slots, None
        # At once: kernels may read it before the kernel just before them ends.
        if slots is not None and logit_rows is not None and logit_rows.shape[0] < slots.shape[0]:
            self._logit_slots = slots.index_select(0, logit_rows)

    def slots_of(self, x: torch.Tensor) -> torch.Tensor:
        """The slots [N] of what a projection is handed, x [N, in]: all tokens, or those of the logits, fewer."""
        assert self._slots is not None
        if x.shape[0] == self._slots.shape[0]:
            return self._slots
        assert self._logit_slots is not None
        assert self._logit_slots.shape[0] == x.shape[0], "neither all tokens nor those of the logits"
        return self._logit_slots


class Adaptable(NamedTuple):
    """A module of the checkpoint that adapters may have matrices for: A [r, inputs], B [outputs, r].

    name: of the module. inputs, outputs: of the whole module. columns: the inputs that the rank has. rows: picks the
    outputs that the rank has of the rows of B, in their order in the layer. num_rows: how many.
    """

    name: str
    inputs: int
    outputs: int
    columns: slice
    rows: Callable[[torch.Tensor], torch.Tensor]
    num_rows: int


class HostMatrices(NamedTuple):
    """The rank's part of an adapter's matrices for one module, in host memory: a [r, in], b [out, r] with its factor.

    number: of the module in its projection.
    """

    number: int
    a: torch.Tensor
    b: torch.Tensor


class ProjectionAdapters:
    """The slots of one projection, or of several with one input as one product.

    inputs: that the rank has. modules: in the order of their outputs.
    """

    def __init__(
        self,
        state: AdapterState,
        inputs: int,
        modules: Sequence[Adaptable],
        device: torch.device,
        dtype: torch.dtype,
        *,
        deterministic: bool,
    ):
        self.state, self.modules, self._deterministic = state, list(modules), deterministic
        rows, slots, rank = tuple(module.num_rows for module in modules), state.max_loras, state.max_rank
        self._weights = ops.AdapterSlots(
            torch.zeros(slots, len(rows), rank, inputs, dtype=dtype, device=device),
            torch.zeros(sum(rows), slots, rank, dtype=dtype, device=device),
            torch.zeros(slots, len(rows), dtype=torch.int32, device=device),
            rows,
        )

    def of(self, x: torch.Tensor) -> ops.TokenAdapters | None:
        """What each of the tokens x [N, in] has; None if no token of the step has an adapter."""
        return None if self.state.is_idle else ops.TokenAdapters(self.state.slots_of(x), self._weights)

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """y [N, out] plus the adapters' products of x [N, in], in place, if any token of the step has one."""
        if (tokens := self.of(x)) is not None:
            ops.add_adapters(x, y, *tokens, deterministic=self._deterministic)
        return y

    def put(self, slot: int, matrices: Sequence[HostMatrices], ranks: torch.Tensor) -> None:
        """Copy an adapter's matrices into a slot, in the order of the stream. ranks: [modules] int32 on the host."""
        a, b, on_device, rows = self._weights
        for number, own_a, own_b in matrices:
            first, rank = sum(rows[:number]), own_a.shape[0]
            a[slot, number, :rank].copy_(own_a, non_blocking=True)
            b[first : first + rows[number], slot, :rank].copy_(own_b, non_blocking=True)
        on_device[slot].copy_(ranks, non_blocking=True)
