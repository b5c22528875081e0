"""The token in flight of a request that is preempted under pressure is thrown away when it arrives."""

from __future__ import annotations

from itertools import compress
from typing import Any

from harness.faults.fault import Patch

STANDS_FOR = "vllm#48245"
CAUGHT_BY = "stale-frame"
SHALLOW = False
ENGINE = {"async_scheduling": True}


def plant(patch: Patch) -> None:
    from engine.core import EngineCore
    from engine.model_runner import Flight

    right = EngineCore.land

    class Some:
        """A flight of which only some tokens arrive."""

        def __init__(self, flight: Flight, arrives: list[bool]) -> None:
            self._flight, self._arrives = flight, arrives

        def wait(self) -> list[Any]:
            return list(compress(self._flight.wait(), self._arrives))

    def land(self: EngineCore) -> None:
        oldest = self._flights[0]
        arrives = [share.request.finish_reason is not None or share.life == share.request.num_preemptions + 1 for share in oldest.sampling]
        some: Any = Some(oldest.flight, arrives)
        self._flights[0] = oldest._replace(sampling=list(compress(oldest.sampling, arrives)), flight=some)
        right(self)

    patch(EngineCore, "land", land)
