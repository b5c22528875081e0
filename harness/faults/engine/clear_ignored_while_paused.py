"""pause(clear_cache=True) of an engine that is paused already does not clear."""

from __future__ import annotations

from typing import Any

from harness.faults.fault import Patch

STANDS_FOR = "the kind of K08: the second of two calls is taken for a repetition"
CAUGHT_BY = "mode-fidelity"
SHALLOW = True


def plant(patch: Patch) -> None:
    from engine.core import EngineCore

    right = EngineCore.begin_pause

    def begin_pause(self: EngineCore, mode: Any = "abort", *, clear_cache: bool = True) -> Any:
        paused = self.is_paused() and not self.pause_pending
        return right(self, mode, clear_cache=clear_cache and not paused)

    patch(EngineCore, "begin_pause", begin_pause)
