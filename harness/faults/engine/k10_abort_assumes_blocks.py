"""Aborting a request that never ran does nothing, for it has no blocks to give back."""

from __future__ import annotations

from harness.faults.fault import Patch

STANDS_FOR = "vllm#49146"
CAUGHT_BY = "api-truth"
SHALLOW = True


def plant(patch: Patch) -> None:
    from engine.core import EngineCore
    from engine.request import Request

    right = EngineCore._abort

    def abort(self: EngineCore, request: Request) -> None:
        if request.blocks:
            right(self, request)

    patch(EngineCore, "_abort", abort)
