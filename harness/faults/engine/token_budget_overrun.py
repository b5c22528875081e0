"""Admissions may take one token more than a step has left."""

from __future__ import annotations

from typing import Any

from harness.faults.fault import Patch

STANDS_FOR = "own: the budget is no promise to clients, only part of the specification"
CAUGHT_BY = "conformance"
SHALLOW = True


def plant(patch: Patch) -> None:
    from engine.scheduler import Scheduler

    right = Scheduler._admit

    def admit(self: Scheduler, limit: int, *, budget: int) -> Any:
        return right(self, limit, budget=budget + 1)

    patch(Scheduler, "_admit", admit)
