"""Digests leave out the cache salt: prompts of two tenants share KV."""

from __future__ import annotations

from harness.faults.fault import Patch

STANDS_FOR = "the kind of K34 (vllm#42125): what tells prefixes apart is not in the digest"
CAUGHT_BY = "block-lifetime"
SHALLOW = True


def plant(patch: Patch) -> None:
    from engine.blocks import PrefixDigests

    right = PrefixDigests.__init__

    def init(self: PrefixDigests, block_size: int, salt: str | None) -> None:
        right(self, block_size, None)

    patch(PrefixDigests, "__init__", init)
