"""A preempted request starts over from its prompt and delivers its tokens a second time."""

from __future__ import annotations

from typing import Any

from harness.faults.fault import Patch

STANDS_FOR = "the kind of K45: retraction loses tokens"
CAUGHT_BY = "token-conservation"
SHALLOW = True


def plant(patch: Patch) -> None:
    from engine.request import Request
    from engine.scheduler import Scheduler

    right = Scheduler._preempt

    def preempt(self: Scheduler, request: Request, **options: Any) -> None:
        del request.token_ids[request.num_prompt_tokens :]
        request._spans = []
        right(self, request, **options)

    patch(Scheduler, "_preempt", preempt)
