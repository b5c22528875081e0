"""An update is answered with success and nothing was written."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from harness.faults.fault import Patch

STANDS_FOR = "tokenspeed#1373"
CAUGHT_BY = "api-truth"
SHALLOW = True


def plant(patch: Patch) -> None:
    from engine.weights import WeightSession

    def write(self: WeightSession, tensors: Iterable[Any]) -> tuple[int, int]:
        for _ in tensors:
            pass
        return 0, 0

    patch(WeightSession, "write", write)
