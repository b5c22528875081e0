"""Two requests of one step are given each other's token by the sampler."""

from __future__ import annotations

from typing import Any

from harness.faults.fault import Patch

STANDS_FOR = "the kind of K01: tokens that are not one's own"
CAUGHT_BY = "golden"
SHALLOW = False


def plant(patch: Patch) -> None:
    from engine.model_runner import ModelRunner

    right = ModelRunner.execute

    def execute(self: ModelRunner, batch: Any) -> Any:
        return right(self, batch)[::-1]

    patch(ModelRunner, "execute", execute)
