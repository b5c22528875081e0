"""A request that was aborted while it was held in front of the core is accepted by the resume."""

from __future__ import annotations

from typing import Any

from harness.faults.fault import Patch

STANDS_FOR = "the kind of K09: a dead request touched later"
CAUGHT_BY = "one-ending"
SHALLOW = False


def plant(patch: Patch) -> None:
    from engine.request import Request, RequestStatus
    from engine.scheduler import Scheduler

    right = Scheduler.finish

    def finish(self: Scheduler, request: Request, reason: Any) -> None:
        held = request.status is RequestStatus.BLOCKED
        right(self, request, reason)
        if held:
            self.blocked.append(request)

    patch(Scheduler, "finish", finish)
