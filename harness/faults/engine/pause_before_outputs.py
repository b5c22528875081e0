"""A pause takes effect before the outputs of the requests that it aborted are handed out."""

from __future__ import annotations

from typing import Any

from harness.faults.fault import Patch

STANDS_FOR = "the kind of K21 (vllm#52914): paused is said too early"
CAUGHT_BY = "quiet-after-pause"
SHALLOW = True


def plant(patch: Patch) -> None:
    from engine.core import EngineCore

    right = EngineCore.begin_pause

    def begin_pause(self: EngineCore, *arguments: Any, **options: Any) -> Any:
        ticket = right(self, *arguments, **options)
        outputs, self._outputs = self._outputs, []
        self.pause_complete()
        self._outputs = outputs
        return ticket

    patch(EngineCore, "begin_pause", begin_pause)
