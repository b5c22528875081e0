"""The reset of pause(keep, clear_cache=True) is refused, as frozen requests hold blocks; nobody looks at the refusal."""

from __future__ import annotations

from harness.faults.fault import Patch

STANDS_FOR = "vllm#34382"
CAUGHT_BY = "cache-epoch"
SHALLOW = False


def plant(patch: Patch) -> None:
    from engine.core import EngineCore

    patch(EngineCore, "_clear_cache", lambda self: self._observer.cleared(success=True, empty=True))
