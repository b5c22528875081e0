"""pause(wait) of a paused engine does not run the requests that the earlier pause parked."""

from __future__ import annotations

from typing import Any

from harness.faults.fault import Patch

STANDS_FOR = "the kind of K19: a pause that forgets who came in between"
CAUGHT_BY = "mode-fidelity"
SHALLOW = False


def plant(patch: Patch) -> None:
    from engine.core import EngineCore

    right = EngineCore.begin_pause

    def begin_pause(self: EngineCore, *arguments: Any, **options: Any) -> Any:
        parked = [request for request in self.scheduler.waiting if request.parked]
        ticket = right(self, *arguments, **options)
        for request in parked:
            request.parked = True
        return ticket

    patch(EngineCore, "begin_pause", begin_pause)
