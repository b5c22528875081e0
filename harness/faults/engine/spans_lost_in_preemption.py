"""A preempted request forgets which weights sampled the tokens that it has."""

from __future__ import annotations

from typing import Any

from harness.faults.fault import Patch

STANDS_FOR = "the kind of K43: labels that do not cover the output"
CAUGHT_BY = "version-attribution"
SHALLOW = True


def plant(patch: Patch) -> None:
    from engine.request import Request
    from engine.scheduler import Scheduler

    right = Scheduler._preempt

    def preempt(self: Scheduler, request: Request, **options: Any) -> None:
        request._spans = []
        right(self, request, **options)

    patch(Scheduler, "_preempt", preempt)
