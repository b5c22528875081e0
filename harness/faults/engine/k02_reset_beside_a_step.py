"""A pause(keep, clear_cache=True) does not wait for the step in flight: its tokens reach the life that begins after the reset."""

from __future__ import annotations

from harness.faults.fault import Patch

STANDS_FOR = "vllm#46066"
CAUGHT_BY = "stale-frame"
SHALLOW = False
ENGINE = {"async_scheduling": True}


def plant(patch: Patch) -> None:
    from engine.core import EngineCore

    right = EngineCore.pause_complete

    def pause_complete(self: EngineCore) -> bool:
        if self.pause_mode != "keep" or self._outputs:
            return right(self)
        flights = self._flights.copy()
        self._flights.clear()
        try:
            return right(self)
        finally:
            self._flights.extend(flights)

    patch(EngineCore, "pause_complete", pause_complete)
