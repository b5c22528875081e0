"""Requests held in front of the core are not let in by the resume."""

from __future__ import annotations

from harness.faults.fault import Patch

STANDS_FOR = "the kind of K06"
CAUGHT_BY = "one-ending"
SHALLOW = False


def plant(patch: Patch) -> None:
    from engine.scheduler import Scheduler

    patch(Scheduler, "accept_blocked", lambda self: None)
