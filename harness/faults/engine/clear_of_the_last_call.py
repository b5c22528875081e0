"""Of pause calls that meet, the last one alone decides whether the cache is cleared."""

from __future__ import annotations

from harness.faults.fault import Patch

STANDS_FOR = "the kind of K18: one slot for several calls"
CAUGHT_BY = "mode-fidelity"
SHALLOW = False


def plant(patch: Patch) -> None:
    from engine.core import EngineCore

    patch(EngineCore, "_clear_asked", property(lambda self: self._tickets[-1].clear_cache))
