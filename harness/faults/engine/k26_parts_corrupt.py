"""Every part of an update but the first is written with its rows moved on by one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from harness.faults.fault import Patch

STANDS_FOR = "vllm#42821, SkyRL#1680"
CAUGHT_BY = "weight-equality"
SHALLOW = False


def plant(patch: Patch) -> None:
    from engine.weights import WeightSession

    right = WeightSession.write

    def write(self: WeightSession, tensors: Iterable[tuple[str, Any]]) -> tuple[int, int]:
        later = bool(self._written)
        return right(self, ((name, tensor.roll(1, 0) if later else tensor) for name, tensor in tensors))

    patch(WeightSession, "write", write)
