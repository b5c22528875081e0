"""Weights are written, and committed, though no session was opened."""

from __future__ import annotations

from harness.faults.fault import Patch

STANDS_FOR = "vllm#57853"
CAUGHT_BY = "atomic-commit"
SHALLOW = True


def plant(patch: Patch) -> None:
    from engine.core import EngineCore
    from engine.weights import WeightSession

    def open_session(self: EngineCore, call: str) -> WeightSession:
        if self._session is None:
            self._session = WeightSession(self.weight_target)
        return self._session

    patch(EngineCore, "_open_session", open_session)
