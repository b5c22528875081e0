"""The KV block pool: who holds a block, in which order blocks are reused, which can be hit.

Scheduler rules R1 and R2 (state) and R5 to R9 and R24 (operations). Block ids run from 0.
A block is *held* (references at least 1), *cached* (no reference, a label) or *free*
(neither); cached and free ones stand in the free queue, and are reused from its head.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Literal, NamedTuple


class Taken(NamedTuple):
    """Blocks in the order in which they were taken, and those among them that lost a label."""

    blocks: tuple[int, ...]
    evicted: tuple[int, ...]


class Released(NamedTuple):
    """Blocks that no one holds any more: afterwards the free queue begins with `head` and ends with `tail`."""

    head: tuple[int, ...]
    tail: tuple[int, ...]


class BlockPool:
    """Every operation is O(1) for each block that it names.

    `epochs[block]` has one entry for each slot of the block that was written since the block
    was last taken: the weights epoch of the step that wrote it.
    """

    __slots__ = ("_unlabelled_to", "block_size", "epochs", "free", "holders", "labels", "references")

    def __init__(self, num_blocks: int, *, block_size: int, unlabelled_to: Literal["head", "tail"] = "head") -> None:
        self.block_size = block_size
        self.references = [0] * num_blocks
        self.labels: list[int | None] = [None] * num_blocks
        self.epochs: list[list[int]] = [[] for _ in range(num_blocks)]
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.holders: dict[int, dict[int, None]] = {}
        """For each label, the blocks that have it, in the order of their publication."""
        self._unlabelled_to = unlabelled_to

    @property
    def nothing_held(self) -> bool:
        return len(self.free) == len(self.references)

    def take(self, count: int) -> Taken:
        """R5: the first `count` blocks of the free queue, each now with one reference and no label."""
        assert count <= len(self.free), f"{count} blocks wanted of {len(self.free)} free ones: ask first"
        blocks = tuple(self.free.popitem(last=False)[0] for _ in range(count))
        evicted = tuple(block for block in blocks if self.labels[block] is not None)
        for block in evicted:
            self._withdraw(block)
        for block in blocks:
            self.references[block] = 1
            self.epochs[block] = []
        return Taken(blocks, evicted)

    def next_evicted(self, count: int) -> list[tuple[int, int]]:
        """(block, label) of those that `take(count)` would take a label from, in the same order."""
        return [(block, label) for block in islice(self.free, count) if (label := self.labels[block]) is not None]

    def release(self, blocks: Sequence[int]) -> Released:
        """R6: one reference less for each; blocks left without any go to the free queue, a request's last block first."""
        idle = []
        for block in reversed(blocks):
            self.references[block] -= 1
            assert self.references[block] >= 0, f"block {block} released more often than it was taken"
            if self.references[block] == 0:
                idle.append(block)
        if self._unlabelled_to == "tail":
            head, tail = (), tuple(idle)
        else:
            head = tuple(block for block in idle if self.labels[block] is None)
            tail = tuple(block for block in idle if self.labels[block] is not None)
        for block in tail:
            self.free[block] = None
        for block in reversed(head):
            self.free[block] = None
            self.free.move_to_end(block, last=False)
        return Released(head, tail)

    def claim(self, blocks: Iterable[int]) -> None:
        """R7: one reference more for each; an idle one leaves its place in the free queue and keeps its label."""
        for block in blocks:
            if self.references[block] == 0:
                del self.free[block]
            self.references[block] += 1

    def publish(self, block: int, label: int) -> None:
        """R8: from now on `block` can be hit. An equal one elsewhere does not prevent it, and keeps its precedence."""
        assert self.references[block] > 0, f"block {block} is published by nobody"
        assert self.labels[block] is None, f"block {block} is published twice"
        self.labels[block] = label
        self.holders.setdefault(label, {})[block] = None

    def find(self, label: int) -> int | None:
        """R9: the first published of the blocks that have this label."""
        holders = self.holders.get(label)
        return next(iter(holders)) if holders else None

    def idle_among(self, blocks: Iterable[int]) -> int:
        """How many of these blocks nobody holds."""
        return sum(self.references[block] == 0 for block in blocks)

    def write(self, blocks: Sequence[int], first: int, count: int, epoch: int) -> None:
        """Note that positions [first, first + count) of the request with this block table are computed at `epoch`."""
        size = self.block_size
        end = first + count
        while first < end:
            index, slot = divmod(first, size)
            written = min(size - slot, end - first)
            entries = self.epochs[blocks[index]]
            assert len(entries) == slot, f"block {blocks[index]} is written at slot {slot} after {len(entries)} slots"
            entries += [epoch] * written
            first += written

    def clear(self) -> None:
        """R24: every label goes; the free queue keeps its order. Only for a pool of which nothing is held."""
        assert self.nothing_held, f"cleared while {len(self.references) - len(self.free)} blocks are held"
        self.labels = [None] * len(self.labels)
        self.holders.clear()

    def digests(self) -> tuple[tuple[int, ...], ...]:
        """Blocks that share a label, each group in order of publication, groups by their smallest block."""
        return tuple(sorted((tuple(blocks) for blocks in self.holders.values()), key=min))

    def _withdraw(self, block: int) -> None:
        label = self.labels[block]
        assert label is not None
        self.labels[block] = None
        holders = self.holders[label]
        del holders[block]
        if not holders:
            del self.holders[label]
