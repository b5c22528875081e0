"""What a request finished with before a pause takes effect is handed out as aborted."""

from __future__ import annotations

from typing import Any

from harness.faults.fault import Patch

STANDS_FOR = "verl-omni#610"
CAUGHT_BY = "token-conservation"
SHALLOW = False


def plant(patch: Patch) -> None:
    from engine.core import EngineCore
    from engine.request import Request

    right = EngineCore._emit

    def emit(self: EngineCore, request: Request, tokens: Any, reason: Any) -> None:
        right(self, request, tokens, "abort" if reason and self.pause_pending else reason)

    patch(EngineCore, "_emit", emit)
