"""A reset reports success and leaves the prefix index as it is: prompts that share a prefix are served old KV."""

from __future__ import annotations

from harness.faults.fault import Patch

STANDS_FOR = "NeMo-RL#4018"
CAUGHT_BY = "cache-epoch"
SHALLOW = False


def plant(patch: Patch) -> None:
    from engine.blocks import BlockPool

    patch(BlockPool, "clear", lambda self: True)
    patch(BlockPool, "is_empty", property(lambda self: True))
