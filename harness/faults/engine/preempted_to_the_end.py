"""A preempted request goes to the end of the queue."""

from __future__ import annotations

from typing import Any

from harness.faults.fault import Patch

STANDS_FOR = "own: the order of the queue is no promise to clients, only part of the specification"
CAUGHT_BY = "conformance"
SHALLOW = False


def plant(patch: Patch) -> None:
    from engine.request import Request
    from engine.scheduler import Scheduler

    right = Scheduler._preempt

    def preempt(self: Scheduler, request: Request, **options: Any) -> None:
        right(self, request, **options)
        self.waiting.append(self.waiting.popleft())

    patch(Scheduler, "_preempt", preempt)
