"""The blocks of a request that ended are freed by the next step; an idle engine never makes one."""

from __future__ import annotations

from typing import Any

from harness.faults.fault import Patch

STANDS_FOR = "vllm#41180"
CAUGHT_BY = "block-lifetime"
SHALLOW = True


def plant(patch: Patch) -> None:
    from engine.request import Request, RequestStatus
    from engine.scheduler import Scheduler

    free, schedule = Scheduler._free, Scheduler.schedule

    def later(self: Scheduler, request: Request) -> None:
        if request.status is RequestStatus.FINISHED:
            vars(self).setdefault("unfreed", []).append(request)
        else:
            free(self, request)

    def scheduled(self: Scheduler) -> Any:
        for request in vars(self).pop("unfreed", []):
            free(self, request)
        return schedule(self)

    patch(Scheduler, "_free", later)
    patch(Scheduler, "schedule", scheduled)
