"""pause(wait) runs frozen requests while a weight session is open and has written."""

from __future__ import annotations

from typing import Any

from harness.faults.fault import Patch

STANDS_FOR = "the kind of K20: a forward over half-new weights"
CAUGHT_BY = "atomic-commit"
SHALLOW = False


def plant(patch: Patch) -> None:
    from engine.core import EngineCore

    right = EngineCore.begin_pause

    def begin_pause(self: EngineCore, *arguments: Any, **options: Any) -> Any:
        session, self._session = self._session, None
        try:
            return right(self, *arguments, **options)
        finally:
            self._session = session

    patch(EngineCore, "begin_pause", begin_pause)
