"""A block's digest covers its own tokens only, not those before it."""

from __future__ import annotations

from collections.abc import Sequence

from harness.faults.fault import Patch

STANDS_FOR = "the kind of K34: equal blocks behind different prefixes share KV"
CAUGHT_BY = "block-lifetime"
SHALLOW = True


def plant(patch: Patch) -> None:
    from engine.blocks import PrefixDigests

    def first(self: PrefixDigests, count: int, token_ids: Sequence[int]) -> list[bytes]:
        size = self._block_size
        return [repr(token_ids[index * size : (index + 1) * size]).encode() for index in range(count)]

    patch(PrefixDigests, "first", first)
