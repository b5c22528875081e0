"""A matrix is read in another order of its rows and columns than it is written in."""

from __future__ import annotations

from typing import Any

from harness.faults.fault import Patch

STANDS_FOR = "vllm#57130"
CAUGHT_BY = "weight-equality"
SHALLOW = True


def plant(patch: Patch) -> None:
    from engine.weights import WeightTarget

    right = WeightTarget.write

    def write(self: WeightTarget, name: str, tensor: Any) -> int:
        return right(self, name, tensor.t().reshape(tensor.shape) if tensor.dim() == 2 else tensor)

    patch(WeightTarget, "write", write)
