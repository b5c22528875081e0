"""A second start forgets the open session, and what it has written, for a new one."""

from __future__ import annotations

from typing import Any

from harness.faults.fault import Patch

STANDS_FOR = "the kind of K22 (vllm#57853): start twice"
CAUGHT_BY = "idempotent-control"
SHALLOW = False


def plant(patch: Patch) -> None:
    from engine.core import EngineCore

    right = EngineCore.start_weight_update

    def start(self: EngineCore, **options: Any) -> None:
        self._session = None
        right(self, **options)

    patch(EngineCore, "start_weight_update", start)
