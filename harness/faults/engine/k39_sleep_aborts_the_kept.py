"""A sleep without a mode pauses by abort, and ends the requests that a pause(keep) holds."""

from __future__ import annotations

from typing import Any

from harness.faults.fault import Patch

STANDS_FOR = "vllm#53082"
CAUGHT_BY = "mode-fidelity"
SHALLOW = False


def plant(patch: Patch) -> None:
    from engine.core import EngineCore

    right = EngineCore.begin_sleep

    def begin_sleep(self: EngineCore, level: Any = 1, mode: Any = None) -> Any:
        return right(self, level, mode or "abort")

    patch(EngineCore, "begin_sleep", begin_sleep)
