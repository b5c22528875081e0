"""A late request that is to be held in front of the core is nowhere."""

from __future__ import annotations

from harness.faults.fault import Patch

STANDS_FOR = "the kind of K07: invisible in the counters"
CAUGHT_BY = "one-ending"
SHALLOW = False


def plant(patch: Patch) -> None:
    from engine.scheduler import Scheduler

    patch(Scheduler, "block", lambda self, request: None)
