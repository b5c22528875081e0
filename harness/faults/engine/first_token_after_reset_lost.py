"""The first token that a request samples after a cache reset preempted it is thrown away as if it were late."""

from __future__ import annotations

from typing import Any

from harness.faults.fault import Patch

STANDS_FOR = "the kind of K01 (vllm#42043), without a step in flight"
CAUGHT_BY = "token-conservation"
SHALLOW = False


def plant(patch: Patch) -> None:
    from engine.core import EngineCore
    from engine.request import Request

    clear, right = EngineCore._clear_cache, EngineCore._emit

    def clear_cache(self: EngineCore) -> None:
        for request in self.scheduler.running:
            vars(request)["discard"] = True
        clear(self)

    def emit(self: EngineCore, request: Request, tokens: Any, reason: Any) -> None:
        if not (tokens and vars(request).pop("discard", False)):
            right(self, request, tokens, reason)

    patch(EngineCore, "_clear_cache", clear_cache)
    patch(EngineCore, "_emit", emit)
