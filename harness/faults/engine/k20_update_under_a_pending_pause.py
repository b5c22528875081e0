"""A weight session opens though the pause before it is pending: steps go on while weights are written."""

from __future__ import annotations

from typing import Any

from harness.faults.fault import Patch

STANDS_FOR = "NeMo-RL#2180"
CAUGHT_BY = "atomic-commit"
SHALLOW = False


def plant(patch: Patch) -> None:
    from engine.core import EngineCore

    right = EngineCore.start_weight_update

    def start(self: EngineCore, **options: Any) -> None:
        tickets, self._tickets = self._tickets, []
        try:
            right(self, **options)
        finally:
            self._tickets = tickets

    patch(EngineCore, "start_weight_update", start)
