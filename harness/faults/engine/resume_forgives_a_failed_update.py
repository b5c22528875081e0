"""A resume puts an engine back into service whose last update broke half-way."""

from __future__ import annotations

from harness.faults.fault import Patch

STANDS_FOR = "the kind of K23: half-new weights served"
CAUGHT_BY = "atomic-commit"
SHALLOW = False


def plant(patch: Patch) -> None:
    from engine.core import EngineCore

    right = EngineCore.resume

    def resume(self: EngineCore) -> None:
        self._failed_update = None
        right(self)

    patch(EngineCore, "resume", resume)
