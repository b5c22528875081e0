"""An engine whose weights a failed update left half-written goes on stepping if nothing paused it."""

from __future__ import annotations

from harness.faults.fault import Patch

STANDS_FOR = "the kind of K23 and K13 (vllm#45520)"
CAUGHT_BY = "no-step-while-paused"
SHALLOW = False


def plant(patch: Patch) -> None:
    from engine.core import EngineCore

    def may_launch(self: EngineCore) -> bool:
        return self.pause_mode != "keep" and self.scheduler.has_work

    patch(EngineCore, "_may_launch", property(may_launch))
