"""The first of several requests that share a block frees it under the others."""

from __future__ import annotations

from collections.abc import Sequence

from harness.faults.fault import Patch

STANDS_FOR = "the kind of K12 (vllm-ascend#14055): freed while still in use"
CAUGHT_BY = "block-lifetime"
SHALLOW = False


def plant(patch: Patch) -> None:
    from engine.blocks import BlockPool, Released

    right = BlockPool.release

    def release(self: BlockPool, blocks: Sequence[int]) -> Released:
        for block in blocks:
            self._references[block] = 1
            self._free.pop(block, None)
        return right(self, blocks)

    patch(BlockPool, "release", release)
