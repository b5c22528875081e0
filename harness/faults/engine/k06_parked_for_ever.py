"""Requests that came while paused stay parked after the resume, and their clients wait for ever."""

from __future__ import annotations

from harness.faults.fault import Patch

STANDS_FOR = "vllm#45326"
CAUGHT_BY = "one-ending"
SHALLOW = False


def plant(patch: Patch) -> None:
    from engine.core import EngineCore

    right = EngineCore.resume

    def resume(self: EngineCore) -> None:
        parked = [request for request in self.scheduler.waiting if request.parked]
        right(self)
        for request in parked:
            request.parked = True

    patch(EngineCore, "resume", resume)
