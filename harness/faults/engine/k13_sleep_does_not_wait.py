"""A sleep does not wait for its pause: it is answered at once, and memory is given back under running requests."""

from __future__ import annotations

from typing import Any

from harness.faults.fault import Patch

STANDS_FOR = "vllm#45520"
CAUGHT_BY = "no-step-while-paused"
SHALLOW = False


def plant(patch: Patch) -> None:
    from engine.core import EngineCore
    from engine.outputs import PauseTicket

    right = EngineCore.begin_sleep

    def begin_sleep(self: EngineCore, level: Any = 1, mode: Any = None) -> PauseTicket:
        ticket = right(self, level, mode)
        if self.has_work():
            self._tickets.remove(ticket)
            ticket.take_effect()
            self._fall_asleep(level)
        return ticket

    patch(EngineCore, "begin_sleep", begin_sleep)
