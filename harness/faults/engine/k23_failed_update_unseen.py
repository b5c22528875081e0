"""An update that broke half-way is forgotten, and half-new weights are served."""

from __future__ import annotations

from typing import Any

from harness.faults.fault import Patch

STANDS_FOR = "trl#6913"
CAUGHT_BY = "atomic-commit"
SHALLOW = False


def plant(patch: Patch) -> None:
    from engine.core import EngineCore

    right = EngineCore._update_failed

    def update_failed(self: EngineCore, *arguments: Any, **options: Any) -> None:
        try:
            right(self, *arguments, **options)
        finally:
            self._failed_update = None

    patch(EngineCore, "_update_failed", update_failed)
