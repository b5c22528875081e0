"""Setting the version aborts every request, those that a pause(keep) holds too."""

from __future__ import annotations

from typing import Any

from harness.faults.fault import Patch

STANDS_FOR = "miles#2589"
CAUGHT_BY = "mode-fidelity"
SHALLOW = False


def plant(patch: Patch) -> None:
    from engine.core import EngineCore

    right = EngineCore.update_weight_version

    def relabel(self: EngineCore, version: str, **options: Any) -> None:
        right(self, version, **options)
        self.abort(None)

    patch(EngineCore, "update_weight_version", relabel)
