"""Blocks that keep a digest go to the head of the free queue, where they are evicted first."""

from __future__ import annotations

from collections.abc import Sequence

from harness.faults.fault import Patch

STANDS_FOR = "own: which block is taken next is no promise to clients, only part of the specification"
CAUGHT_BY = "conformance"
SHALLOW = True


def plant(patch: Patch) -> None:
    from engine.blocks import BlockPool, Released

    right = BlockPool.release

    def release(self: BlockPool, blocks: Sequence[int]) -> Released:
        head, tail = right(self, blocks)
        for block in reversed(tail):
            self._free.move_to_end(block, last=False)
        return Released((*tail, *head), ())

    patch(BlockPool, "release", release)
