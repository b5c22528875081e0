"""A preempted request forgets its blocks instead of giving them back."""

from __future__ import annotations

from harness.faults.fault import Patch

STANDS_FOR = "the kind of K11: a path on which nothing is freed"
CAUGHT_BY = "block-lifetime"
SHALLOW = False


def plant(patch: Patch) -> None:
    from engine.request import Request, RequestStatus
    from engine.scheduler import Scheduler

    right = Scheduler._free

    def free(self: Scheduler, request: Request) -> None:
        if request.status is RequestStatus.PREEMPTED:
            request.blocks, request.num_registered_blocks = [], 0
        else:
            right(self, request)

    patch(Scheduler, "_free", free)
