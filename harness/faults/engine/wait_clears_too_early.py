"""pause(wait, clear_cache=True) clears when it is taken up; what its requests compute until then stays."""

from __future__ import annotations

from typing import Any

from harness.faults.fault import Patch

STANDS_FOR = "the kind of K31: a reset at the wrong moment"
CAUGHT_BY = "mode-fidelity"
SHALLOW = False


def plant(patch: Patch) -> None:
    from engine.core import EngineCore

    begin, clear = EngineCore.begin_pause, EngineCore._clear_cache

    def begin_pause(self: EngineCore, mode: Any = "abort", *, clear_cache: bool = True) -> Any:
        ticket = begin(self, mode, clear_cache=clear_cache)
        if mode == "wait" and clear_cache:
            clear(self)
        return ticket

    def clear_cache(self: EngineCore) -> None:
        if self.pause_mode != "wait":
            clear(self)

    patch(EngineCore, "begin_pause", begin_pause)
    patch(EngineCore, "_clear_cache", clear_cache)
