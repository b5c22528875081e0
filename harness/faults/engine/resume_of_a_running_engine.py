"""A resume of an engine that is not paused resumes it once more."""

from __future__ import annotations

from harness.faults.fault import Patch

STANDS_FOR = "the kind of K38 (vllm#55229): a repeated call takes another branch"
CAUGHT_BY = "idempotent-control"
SHALLOW = True


def plant(patch: Patch) -> None:
    from engine.core import EngineCore

    right = EngineCore.resume

    def resume(self: EngineCore) -> None:
        running = not self.is_paused()
        right(self)
        if running:
            self._observer.resumed()

    patch(EngineCore, "resume", resume)
