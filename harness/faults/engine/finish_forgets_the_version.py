"""An update is committed under the label that was resident, whatever the call named."""

from __future__ import annotations

from harness.faults.fault import Patch

STANDS_FOR = "the kind of K43: a label that names other weights"
CAUGHT_BY = "atomic-commit"
SHALLOW = True


def plant(patch: Patch) -> None:
    from engine.core import EngineCore

    right = EngineCore.finish_weight_update

    def finish(self: EngineCore, weight_version: str | None = None) -> None:
        right(self, None)

    patch(EngineCore, "finish_weight_update", finish)
