"""The host tier's bookkeeping: which evicted blocks have a copy in host memory, and which copy goes next.

Slot numbers only, as in blocks.py: the KV itself lies in attention.py.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable
from typing import Literal, NamedTuple

from .blocks import Digest


class BlockCopy(NamedTuple):
    """A block's KV is to be copied between the device and the host, before the pass that is scheduled runs."""

    to: Literal["host", "device"]
    block: int
    slot: int


class HostTier:
    """Slots 0 to num_slots - 1, each empty or holding a copy of the block that a digest names. No digest has two."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._digest_of: OrderedDict[int, Digest] = OrderedDict()  # the least recently used first
        self._slot_of: dict[Digest, int] = {}

    @property
    def is_empty(self) -> bool:
        return not self._digest_of

    @property
    def slots(self) -> tuple[int, ...]:
        """Slots that hold a copy, the least recently used first."""
        return tuple(self._digest_of)

    def __contains__(self, digest: Digest) -> bool:
        return digest in self._slot_of

    def find(self, digests: Iterable[Digest]) -> tuple[int, ...]:
        """Slots of the longest run of `digests` that have a copy; nothing changes."""
        found = []
        for digest in digests:
            if (slot := self._slot_of.get(digest)) is None:
                break
            found.append(slot)
        return tuple(found)

    def use(self, slots: Iterable[int]) -> None:
        """These copies are used now, in this order."""
        for slot in slots:
            self._digest_of.move_to_end(slot)

    def offload(self, digest: Digest, *, keep: Container[int]) -> int | None:
        """Choose a slot for a copy: the lowest one never used since the last clear, else the least recently used one, whose copy is lost.

        Args:
            keep: slots that are not to be given up.

        Returns:
            The slot; None if every one is to be kept.
        """
        assert digest not in self._slot_of, digest
        if len(self._digest_of) < self._num_slots:
            slot = len(self._digest_of)
        else:
            slot = next((slot for slot in self._digest_of if slot not in keep), None)
            if slot is None:
                return None
            del self._slot_of[self._digest_of.pop(slot)]
        self._digest_of[slot] = digest
        self._slot_of[digest] = slot
        return slot

    def clear(self) -> None:
        """Forget every copy."""
        self._digest_of.clear()
        self._slot_of.clear()
