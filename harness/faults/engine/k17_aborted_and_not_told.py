"""pause(abort) ends requests and sends no output for them: their clients wait."""

from __future__ import annotations

from typing import Any

from harness.faults.fault import Patch

STANDS_FOR = "tpu-inference#3362"
CAUGHT_BY = "quiet-after-pause"
SHALLOW = True


def plant(patch: Patch) -> None:
    from engine.core import EngineCore

    right = EngineCore.begin_pause

    def begin_pause(self: EngineCore, *arguments: Any, **options: Any) -> Any:
        outputs = list(self._outputs)
        ticket = right(self, *arguments, **options)
        self._outputs = outputs
        return ticket

    patch(EngineCore, "begin_pause", begin_pause)
