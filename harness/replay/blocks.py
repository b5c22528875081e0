"""The KV pool and the host tier as a log tells of them: who holds which block, and what is written in it."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from harness.replay.facts import NEVER, Request


class Copy(NamedTuple):
    """A block's KV in the host tier."""

    label: int
    written: list[int]
    """As `Blocks.written` had it."""


class Blocks:
    """The KV pool: who holds which block, which can be hit, in what order they will be taken, what is written in them; and
    the copies of evicted blocks in the host tier, if there is one."""

    __slots__ = (
        "count",
        "evicted",
        "forgotten",
        "forgotten_slots",
        "free",
        "groups",
        "host",
        "host_count",
        "labels",
        "owners",
        "references",
        "size",
        "written",
    )

    def __init__(self, count: int, size: int, host_count: int = 0) -> None:
        self.count = count
        self.host_count = host_count
        self.host: OrderedDict[int, Copy] = OrderedDict()
        """By slot, the least recently used first."""
        self.evicted: dict[int, Copy] = {}
        """With a host tier: what the blocks that were allocated last held before."""
        self.size = size
        """Tokens in a block."""
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(count))
        """The free queue, head first."""
        self.references: dict[int, int] = dict.fromkeys(range(count), 0)
        self.owners: dict[int, Request] = {}
        """To whom a block was last allocated: the only one to write into it."""
        self.labels: dict[int, int] = {}
        self.groups: dict[int, dict[int, None]] = {}
        """Blocks of each label, in order of registration."""
        self.written: dict[int, list[int]] = {}
        """For each slot of a block, the number of the `launched` that wrote it since the block was allocated, or NEVER."""
        self.forgotten: set[int] = set()
        """Blocks whose digest a reset was to forget, and that were neither allocated nor published since, ..."""
        self.forgotten_slots: set[int] = set()
        """... and slots of the host tier whose copy it was to forget, and that were not used since."""

    def take(self, request: Request, blocks: tuple[int, ...], evicted: tuple[int, ...]) -> None:
        if self.host_count:
            labels, written = self.labels, self.written
            self.evicted = {block: Copy(labels[block], written.get(block, [])) for block in evicted if block in labels}
        for block in evicted:
            self._unlabel(block)
        for block in blocks:
            self.free.pop(block, None)
            self.references[block] = self.references.get(block, 0) + 1
            self.owners[block] = request
            self.written[block] = [NEVER] * self.size
            self.forgotten.discard(block)
        request.blocks += blocks

    def claim(self, request: Request, blocks: tuple[int, ...]) -> None:
        for block in blocks:
            self.free.pop(block, None)
            self.references[block] = self.references.get(block, 0) + 1
        request.blocks += blocks
        request.hits += blocks

    def offload(self, pairs: tuple[tuple[int, int], ...]) -> None:
        for block, slot in pairs:
            self.host.pop(slot, None)
            self.forgotten_slots.discard(slot)
            if block in self.evicted:
                self.host[slot] = self.evicted[block]

    def load(self, request: Request, pairs: tuple[tuple[int, int], ...]) -> None:
        for slot, block in pairs:
            if (copy := self.host.get(slot)) is not None:
                self.host.move_to_end(slot)
                self.written[block] = list(copy.written)
            request.hits += (block,)

    def publish(self, pairs: tuple[tuple[int, int], ...]) -> None:
        for block, label in pairs:
            self._unlabel(block)
            self.labels[block] = label
            self.groups.setdefault(label, {})[block] = None
            self.forgotten.discard(block)

    def release(self, request: Request, head: tuple[int, ...], tail: tuple[int, ...]) -> None:
        for block in request.blocks:
            self.references[block] = max(self.references.get(block, 0) - 1, 0)
        request.blocks, request.hits = [], ()
        request.oldest_write = request.unwritten = NEVER
        for block in reversed(head):
            self.free[block] = None
            self.free.move_to_end(block, last=False)
        for block in tail:
            self.free[block] = None
            self.free.move_to_end(block)

    def forget_labels(self) -> None:
        self.forgotten |= self.labels.keys()
        self.labels.clear()
        self.groups.clear()

    def forget_copies(self) -> None:
        self.forgotten_slots |= self.host.keys()
        self.host.clear()

    def write(self, request: Request, first: int, count: int, seq: int) -> None:
        """A step launched at `seq` computes positions [first, first + count), attending to all before them."""
        if request.hits:
            self._attend(request)
        if request.oldest_write == NEVER:
            request.oldest_write = seq
        table, size = request.blocks, self.size
        if count == 1:  # as nearly every row of a decode
            index, offset = divmod(first, size)
            if index < len(table):
                self._slots(table[index])[offset] = seq
            return
        position, end = first, min(first + count, len(table) * size)
        while position < end:
            index, offset = divmod(position, size)
            length = min(size - offset, end - position)
            self._slots(table[index])[offset : offset + length] = [seq] * length
            position += length

    def write_each(self, request: Request, first: int, launches: list[int]) -> None:
        """Steps launched at these events compute a position each, from `first` on; the request has attended to its hits before."""
        table, size, done = request.blocks, self.size, 0
        while done < len(launches) and (position := first + done) < len(table) * size:
            index, offset = divmod(position, size)
            slots = self._slots(table[index])
            written = launches[done : done + size - offset]
            slots[offset : offset + len(written)] = written
            done += len(written)

    def _slots(self, block: int) -> list[int]:
        """What is written in a block, to be changed; one that was never allocated has nothing in it."""
        slots = self.written.get(block)
        if slots is None:
            slots = self.written[block] = [NEVER] * self.size
        return slots

    def _attend(self, request: Request) -> None:
        for index, block in enumerate(request.hits):
            slots = self.written.get(block, [NEVER] * self.size)
            written = [seq for seq in slots if seq != NEVER]
            if len(written) < self.size and request.unwritten == NEVER:
                request.unwritten = index * self.size + slots.index(NEVER)
            if written and not NEVER < request.oldest_write < min(written):
                request.oldest_write = min(written)
        request.hits = ()

    def _unlabel(self, block: int) -> None:
        if (label := self.labels.pop(block, None)) is not None:
            group = self.groups[label]
            del group[block]
            if not group:
                del self.groups[label]
