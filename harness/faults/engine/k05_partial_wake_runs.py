"""Waking the weights alone ends the pause: a step runs while the KV cache is asleep."""

from __future__ import annotations

from collections.abc import Iterable

from harness.faults.fault import Patch

STANDS_FOR = "vllm#44395"
CAUGHT_BY = "no-step-while-paused"
SHALLOW = False


def plant(patch: Patch) -> None:
    from engine.core import EngineCore

    right = EngineCore.wake_up

    def wake_up(self: EngineCore, tags: Iterable[str] | None = None) -> None:
        right(self, tags)
        if self.is_sleeping() and "weights" not in self.asleep and not (self.is_out_of_service or self.update_open):
            self._end_pause(by="wake_up")

    patch(EngineCore, "wake_up", wake_up)
