"""When the first request that waits does not fit, the next one is admitted."""

from __future__ import annotations

from typing import Any

from harness.faults.fault import Patch

STANDS_FOR = "own: the order of admission is no promise to clients, only part of the specification"
CAUGHT_BY = "conformance"
SHALLOW = False


def plant(patch: Patch) -> None:
    from engine.scheduler import Scheduler

    right = Scheduler._admit

    def admit(self: Scheduler, *arguments: Any, **options: Any) -> Any:
        batch = right(self, *arguments, **options)
        if not batch and len(self.waiting) > 1:
            first = self.waiting.popleft()
            batch = right(self, *arguments, **options)
            self.waiting.appendleft(first)
        return batch

    patch(Scheduler, "_admit", admit)
