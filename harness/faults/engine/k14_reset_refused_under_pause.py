"""A reset needs an empty queue, which the pause has just filled."""

from __future__ import annotations

from harness.faults.fault import Patch

STANDS_FOR = "sglang#33783"
CAUGHT_BY = "reset-truth"
SHALLOW = False


def plant(patch: Patch) -> None:
    from engine.core import EngineCore

    right = EngineCore.reset_prefix_cache

    def reset(self: EngineCore) -> None:
        mode, self._pause_mode = self._pause_mode, None
        try:
            right(self)
        finally:
            self._pause_mode = mode

    patch(EngineCore, "reset_prefix_cache", reset)
