"""The host tier: copies of evicted blocks in host memory, found by label as blocks on the device are.

A slot holds one copy, a label has one copy at most. With no slots every method finds nothing and keeps nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container
from typing import NamedTuple


class Content(NamedTuple):
    """A full block's KV: what it stands for, and the weights epoch of each of its entries."""

    label: int
    epochs: tuple[int, ...]


class HostTier:
    """Slots run from 0. One that was never used since the last clear is taken first, else the least recently used one."""

    __slots__ = ("_slot_of", "copies", "num_slots")

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.copies: OrderedDict[int, Content] = OrderedDict()
        """By slot, the least recently used first."""
        self._slot_of: dict[int, int] = {}

    def find(self, label: int) -> int | None:
        """The slot with the copy of that label."""
        return self._slot_of.get(label)

    def keep(self, content: Content, *, sparing: Container[int]) -> int | None:
        """Copy a block that has no copy yet; returns the slot, or None if every slot is to be spared."""
        slot = len(self.copies)
        if slot == self.num_slots:
            slot = next((used for used in self.copies if used not in sparing), None)
            if slot is None:
                return None
            del self._slot_of[self.copies.pop(slot).label]
        self.copies[slot] = content
        self._slot_of[content.label] = slot
        return slot

    def load(self, slot: int) -> Content:
        """The copy in a slot, which is used by this."""
        self.copies.move_to_end(slot)
        return self.copies[slot]

    def clear(self) -> None:
        self.copies.clear()
        self._slot_of.clear()
