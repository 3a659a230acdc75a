"""`AdapterSlots`: which adapters have slots in device memory, and who uses them.

A step has at most as many adapters as there are slots. A sequence holds its adapter's slot while it runs; an adapter
that nobody holds keeps its slot until another one needs it, the one first with which no request began for longest.
"""

from __future__ import annotations

from collections import OrderedDict


class AdapterSlots:
    """The slots of one engine. Adapters are known by their ids."""

    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        # Adapters that all workers have in host memory.
        self.loaded: set[int] = set()
        self.clear()

    def clear(self) -> None:
        """Forget what is on the device."""
        self._slot_of: OrderedDict[int, int] = OrderedDict()  # adapter -> slot, in the order of their latest beginnings
        self._users: dict[int, int] = {}  # adapter -> how many running sequences have it; at least one each
        self._free = list(range(self.num_slots - 1, -1, -1))
        # For the next plan, as it has them.
        self.puts: list[tuple[int, int]] = []
        self.drops: list[int] = []

    def can_hold(self, adapter: int) -> bool:
        """Whether a sequence with this adapter may run now."""
        if adapter not in self.loaded:
            return False
        return adapter in self._slot_of or bool(self._free) or len(self._users) < self.num_slots

    def is_resident(self, adapter: int) -> bool:
        """Whether it has a slot, and can be used."""
        return adapter in self._slot_of and adapter in self.loaded

    def least_recent(self) -> list[int]:
        """The adapters that have slots, in the order in which others will take them."""
        return list(self._slot_of)

    def hold(self, adapter: int) -> int:
        """A sequence with this adapter begins to run, which `can_hold`; returns the slot."""
        if adapter not in self._slot_of:
            if not self._free:
                self._free.append(self._slot_of.pop(next(each for each in self._slot_of if each not in self._users)))
            self._slot_of[adapter] = self._free.pop()
            self.puts.append((self._slot_of[adapter], adapter))
        self._users[adapter] = self._users.get(adapter, 0) + 1
        return self._slot_of[adapter]

    def renew(self, adapter: int) -> None:
        """A request with this adapter begins. Only that counts for the order: those that have begun come to an end."""
        if adapter in self._slot_of:
            self._slot_of.move_to_end(adapter)

    def release(self, adapter: int) -> None:
        """A sequence that held it runs no more."""
        self._users[adapter] -= 1
        if not self._users[adapter]:
            del self._users[adapter]

    def forget(self, adapter: int) -> None:
        """No sequence will use it again, and none does."""
        self.loaded.discard(adapter)
        if (slot := self._slot_of.pop(adapter, None)) is not None:
            self._free.append(slot)
            self.puts = [put for put in self.puts if put[1] != adapter]
        self.drops.append(adapter)

    def check_integrity(self, running: list[int]) -> None:
        """Raise AssertionError unless the records agree with each other and with the adapters of running sequences."""
        counts = {adapter: running.count(adapter) for adapter in running}
        assert counts == self._users, f"adapters are held {self._users}, and running sequences have {counts}"
        assert set(self._users) <= set(self._slot_of), "an adapter that is used has no slot"
        slots = sorted([*self._slot_of.values(), *self._free])
        assert slots == list(range(self.num_slots)), f"the slots are {slots}"
