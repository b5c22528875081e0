"""What the first update sent is kept, and written again by every later one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from harness.faults.fault import Patch

STANDS_FOR = "vllm#32718"
CAUGHT_BY = "weight-equality"
SHALLOW = False


def plant(patch: Patch) -> None:
    from engine.weights import WeightSession

    right = WeightSession.write

    def write(self: WeightSession, tensors: Iterable[tuple[str, Any]]) -> tuple[int, int]:
        kept = vars(self._target).setdefault("kept", {})
        return right(self, ((name, kept.setdefault(name, tensor)) for name, tensor in tensors))

    patch(WeightSession, "write", write)
