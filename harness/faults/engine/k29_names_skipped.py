"""Names that the engine does not expect are skipped without a word: those of the feed-forward layers, here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from harness.faults.fault import Patch

STANDS_FOR = "ATOM#2028"
CAUGHT_BY = "weight-equality"
SHALLOW = True


def plant(patch: Patch) -> None:
    from engine.weights import WeightSession

    right = WeightSession.write

    def write(self: WeightSession, tensors: Iterable[tuple[str, Any]]) -> tuple[int, int]:
        return right(self, ((name, tensor) for name, tensor in tensors if ".mlp." not in name))

    patch(WeightSession, "write", write)
