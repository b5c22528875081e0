"""A resume is not refused while a weight session is open."""

from __future__ import annotations

from harness.faults.fault import Patch

STANDS_FOR = "the kind of K20: a forward over half-new weights"
CAUGHT_BY = "atomic-commit"
SHALLOW = False


def plant(patch: Patch) -> None:
    from engine.core import EngineCore

    right = EngineCore.resume

    def resume(self: EngineCore) -> None:
        session, self._session = self._session, None
        try:
            right(self)
        finally:
            self._session = session

    patch(EngineCore, "resume", resume)
