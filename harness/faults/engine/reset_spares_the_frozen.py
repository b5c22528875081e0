"""A reset under a pause empties the index, reports success, and leaves frozen requests their blocks."""

from __future__ import annotations

from harness.faults.fault import Patch

STANDS_FOR = "the kind of K08: a reset that is half done"
CAUGHT_BY = "reset-truth"
SHALLOW = False


def plant(patch: Patch) -> None:
    from engine.core import EngineCore

    def clear_cache(self: EngineCore) -> None:
        pool = self.scheduler.pool
        pool._index.clear()
        pool._digest_of = [None] * len(pool._digest_of)
        self._observer.cleared(success=True, empty=True)

    patch(EngineCore, "_clear_cache", clear_cache)
