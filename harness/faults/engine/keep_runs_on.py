"""pause(keep) takes effect and its requests run on."""

from __future__ import annotations

from harness.faults.fault import Patch

STANDS_FOR = "the kind of K05 (vllm#44395): a step where there may be none"
CAUGHT_BY = "no-step-while-paused"
SHALLOW = True


def plant(patch: Patch) -> None:
    from engine.core import EngineCore

    def may_launch(self: EngineCore) -> bool:
        frozen = self.pause_mode == "keep" and self.pause_pending
        return not self.is_out_of_service and not frozen and self.scheduler.has_work

    patch(EngineCore, "_may_launch", property(may_launch))
