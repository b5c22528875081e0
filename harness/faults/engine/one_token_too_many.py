"""A request ends one token beyond its max_tokens."""

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
        at_limit = request.num_output_tokens == request.params.max_tokens and request.num_tokens < self.config.max_model_len
        return None if at_limit else right(self, request)

    patch(Scheduler, "_finish_reason", finish_reason)
