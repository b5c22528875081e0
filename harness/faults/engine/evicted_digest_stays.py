"""A block that is given away loses its digest and stays in the index: it is hit while it holds something else."""

from __future__ import annotations

from harness.faults.fault import Patch

STANDS_FOR = "the kind of K35: the index outlives what it points to"
CAUGHT_BY = "block-lifetime"
SHALLOW = True


def plant(patch: Patch) -> None:
    from engine.blocks import BlockPool

    def withdraw(self: BlockPool, block: int) -> None:
        self._digest_of[block] = None

    patch(BlockPool, "_withdraw", withdraw)
