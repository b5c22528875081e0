"""pause(abort) ends the requests that run, and leaves those that wait."""

from __future__ import annotations

from typing import Any

from harness.faults.fault import Patch

STANDS_FOR = "the kind of K17: a pause that does not reach everyone"
CAUGHT_BY = "mode-fidelity"
SHALLOW = False


def plant(patch: Patch) -> None:
    from engine.core import EngineCore
    from engine.request import RequestStatus

    right = EngineCore.begin_pause

    def begin_pause(self: EngineCore, *arguments: Any, **options: Any) -> Any:
        requests = self.scheduler.requests
        self.scheduler.requests = {id: one for id, one in requests.items() if one.status is RequestStatus.RUNNING}
        try:
            return right(self, *arguments, **options)
        finally:
            ended = [id for id, request in requests.items() if request.status is RequestStatus.FINISHED]
            self.scheduler.requests = {id: request for id, request in requests.items() if id not in ended}

    patch(EngineCore, "begin_pause", begin_pause)
