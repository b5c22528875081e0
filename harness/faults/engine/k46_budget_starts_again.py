"""A preempted request comes back as prompt and partial output, and its token budget is counted from there."""

from __future__ import annotations

from typing import Any

from harness.faults.fault import Patch

STANDS_FOR = "verl#7207"
CAUGHT_BY = "bookkeeping-shape"
SHALLOW = True


def plant(patch: Patch) -> None:
    from engine.request import Request
    from engine.scheduler import Scheduler

    preempt, right = Scheduler._preempt, Scheduler._finish_reason

    def preempted(self: Scheduler, request: Request, **options: Any) -> None:
        vars(request)["spent"] = request.num_output_tokens
        preempt(self, request, **options)

    def finish_reason(self: Scheduler, request: Request) -> Any:
        reason = right(self, request)
        if reason != "length" or request.num_tokens >= self.config.max_model_len:
            return reason
        left = request.params.max_tokens - request.num_output_tokens + vars(request).get("spent", 0)
        return reason if left <= 0 else None

    patch(Scheduler, "_preempt", preempted)
    patch(Scheduler, "_finish_reason", finish_reason)
