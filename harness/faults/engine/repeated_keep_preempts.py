"""A second pause(keep) preempts the requests that the first one froze."""

from __future__ import annotations

from typing import Any

from harness.faults.fault import Patch

STANDS_FOR = "the kind of K41 (miles#2589): a call that should do nothing"
CAUGHT_BY = "idempotent-control"
SHALLOW = False


def plant(patch: Patch) -> None:
    from engine.core import EngineCore

    right = EngineCore.begin_pause

    def begin_pause(self: EngineCore, mode: Any = "abort", **options: Any) -> Any:
        if mode == "keep" and self.pause_mode == "keep":
            self.scheduler.preempt_all()
        return right(self, mode, **options)

    patch(EngineCore, "begin_pause", begin_pause)
