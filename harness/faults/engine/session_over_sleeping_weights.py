"""A weight session may be opened while the weights are asleep; it maps them again, and nobody is told."""

from __future__ import annotations

from typing import Any

from harness.faults.fault import Patch

STANDS_FOR = "the kind of K22 (vllm#57853): an update while asleep"
CAUGHT_BY = "atomic-commit"
SHALLOW = False


def plant(patch: Patch) -> None:
    from engine.core import EngineCore

    right = EngineCore.start_weight_update

    def start(self: EngineCore, **options: Any) -> None:
        self.runner.memory["weights"].map_again()
        right(self, **options)

    patch(EngineCore, "start_weight_update", start)
