"""A reset that is refused, as requests hold blocks, is answered with success."""

from __future__ import annotations

from contextlib import suppress

from harness.faults.fault import Patch

STANDS_FOR = "vllm#12284"
CAUGHT_BY = "api-truth"
SHALLOW = True


def plant(patch: Patch) -> None:
    from engine.core import EngineCore
    from engine.errors import CacheBusy

    right = EngineCore.reset_prefix_cache

    def reset(self: EngineCore) -> None:
        with suppress(CacheBusy):
            right(self)

    patch(EngineCore, "reset_prefix_cache", reset)
