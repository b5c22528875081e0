"""A swap sets the version first; one that is refused or fails leaves the new label on the old weights."""

from __future__ import annotations

from typing import Any

from harness.faults.fault import Patch

STANDS_FOR = "the kind of K43: a label that names other weights"
CAUGHT_BY = "version-attribution"
SHALLOW = False


def plant(patch: Patch) -> None:
    from engine.core import EngineCore

    right = EngineCore.load_weights

    def load_weights(self: EngineCore, source: Any, weight_version: str | None = None) -> None:
        self._weight_version = weight_version or self._weight_version
        right(self, source, weight_version)

    patch(EngineCore, "load_weights", load_weights)
