"""A request that is aborted while it waits preempted ends without the tokens that it had."""

from __future__ import annotations

from typing import Any

from harness.faults.fault import Patch

STANDS_FOR = "sglang#11673"
CAUGHT_BY = "token-conservation"
SHALLOW = False


def plant(patch: Patch) -> None:
    from engine.request import Request, RequestStatus
    from engine.scheduler import Scheduler

    right = Scheduler.finish

    def finish(self: Scheduler, request: Request, reason: Any) -> None:
        if request.status is RequestStatus.PREEMPTED:
            del request.token_ids[request.num_prompt_tokens :]
            request._spans = []
        right(self, request, reason)

    patch(Scheduler, "finish", finish)
