"""Two requests of one step are given each other's token by the sampler."""

from __future__ import annotations

from typing import Any

from harness.faults.fault import Patch

STANDS_FOR = "the kind of K01: tokens that are not one's own"
CAUGHT_BY = "golden"
SHALLOW = False


def plant(patch: Patch) -> None:
    from engine.model_runner import Flight

    right = Flight.wait

    def wait(self: Flight) -> Any:
        return right(self)[::-1]

    patch(Flight, "wait", wait)
