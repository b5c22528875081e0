"""A request is cut off one token before its max_tokens."""

from __future__ import annotations

from typing import Any

from harness.faults.fault import Patch

STANDS_FOR = "the kind of K46: the budget is not kept"
CAUGHT_BY = "bookkeeping-shape"
SHALLOW = True


def plant(patch: Patch) -> None:
    from engine.request import Request
    from engine.scheduler import Scheduler

    right = Scheduler._finish_reason

    def finish_reason(self: Scheduler, request: Request) -> Any:
        return "length" if request.num_output_tokens + 1 == request.params.max_tokens else right(self, request)

    patch(Scheduler, "_finish_reason", finish_reason)
