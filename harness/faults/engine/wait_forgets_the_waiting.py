"""pause(wait) runs those that are running to their end, and leaves those that wait or were preempted."""

from __future__ import annotations

from typing import Any

from harness.faults.fault import Patch

STANDS_FOR = "vllm, PauseState.PAUSED_NEW (read in its sources)"
CAUGHT_BY = "mode-fidelity"
SHALLOW = False


def plant(patch: Patch) -> None:
    from engine.core import EngineCore
    from engine.scheduler import Scheduler

    begin, admit, has_work = EngineCore.begin_pause, Scheduler._admit, Scheduler.has_work
    assert isinstance(has_work, property) and has_work.fget
    right = has_work.fget

    def begin_pause(self: EngineCore, mode: Any = "abort", **options: Any) -> Any:
        ticket = begin(self, mode, **options)
        vars(self.scheduler)["core"] = self
        return ticket

    def closed(self: Scheduler) -> bool:
        return "core" in vars(self) and vars(self)["core"].pause_mode == "wait"

    patch(EngineCore, "begin_pause", begin_pause)
    patch(Scheduler, "_admit", lambda self, *arguments, **options: [] if closed(self) else admit(self, *arguments, **options))
    patch(Scheduler, "has_work", property(lambda self: bool(self.running) if closed(self) else right(self)))
