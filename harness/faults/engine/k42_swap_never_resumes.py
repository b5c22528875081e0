"""After a swap in one call the resume leaves the requests that came meanwhile where they are."""

from __future__ import annotations

from typing import Any

from harness.faults.fault import Patch

STANDS_FOR = "AReaL#1160"
CAUGHT_BY = "one-ending"
SHALLOW = False


def plant(patch: Patch) -> None:
    from engine.core import EngineCore

    load, right = EngineCore.load_weights, EngineCore.resume

    def load_weights(self: EngineCore, *arguments: Any) -> None:
        load(self, *arguments)
        vars(self)["parked"] = [request for request in self.scheduler.waiting if request.parked]

    def resume(self: EngineCore) -> None:
        right(self)
        for request in vars(self).get("parked", ()):
            request.parked = True

    patch(EngineCore, "load_weights", load_weights)
    patch(EngineCore, "resume", resume)
