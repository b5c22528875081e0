"""A pause waits for requests that came after it, which only the resume would let run."""

from __future__ import annotations

from harness.faults.fault import Patch

STANDS_FOR = "vime#294"
CAUGHT_BY = "quiet-after-pause"
SHALLOW = False


def plant(patch: Patch) -> None:
    from engine.core import EngineCore

    right = EngineCore.pause_complete

    def pause_complete(self: EngineCore) -> bool:
        if self._tickets and self.pause_mode != "keep" and self.scheduler.waiting:
            return False
        return right(self)

    patch(EngineCore, "pause_complete", pause_complete)
