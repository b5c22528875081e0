"""What a request had generated when it was preempted counts as its prompt from then on."""

from __future__ import annotations

from typing import Any

from harness.faults.fault import Patch

STANDS_FOR = "the kind of K46: resumed as prompt and partial output"
CAUGHT_BY = "bookkeeping-shape"
SHALLOW = True


def plant(patch: Patch) -> None:
    from engine.request import Request
    from engine.scheduler import Scheduler

    right = Scheduler._preempt

    def preempt(self: Scheduler, request: Request, **options: Any) -> None:
        right(self, request, **options)
        request.num_prompt_tokens = request.num_tokens

    patch(Scheduler, "_preempt", preempt)
