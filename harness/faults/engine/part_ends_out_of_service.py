"""After a failed update, a session of some tensors is enough to be back in service."""

from __future__ import annotations

from harness.faults.fault import Patch

STANDS_FOR = "the kind of K23: half of the weights are still those of the update that failed"
CAUGHT_BY = "atomic-commit"
SHALLOW = False


def plant(patch: Patch) -> None:
    from engine.weights import WeightSession

    patch(WeightSession, "missing", property(lambda self: []))
