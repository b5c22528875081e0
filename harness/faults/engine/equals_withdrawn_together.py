"""When one of several blocks of equal digest is given away, none of them can be hit any more."""

from __future__ import annotations

from harness.faults.fault import Patch

STANDS_FOR = "own: a miss costs time only, so that nothing but the specification sees it"
CAUGHT_BY = "conformance"
SHALLOW = False


def plant(patch: Patch) -> None:
    from engine.blocks import BlockPool

    def withdraw(self: BlockPool, block: int) -> None:
        digest, self._digest_of[block] = self._digest_of[block], None
        if digest is not None:
            self._index.pop(digest, None)

    patch(BlockPool, "_withdraw", withdraw)
