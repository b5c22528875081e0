"""Every pause clears the cache, clear_cache=False too."""

from __future__ import annotations

from harness.faults.fault import Patch

STANDS_FOR = "the kind of K39 (vllm#53082): a default in place of what was asked for"
CAUGHT_BY = "mode-fidelity"
SHALLOW = True


def plant(patch: Patch) -> None:
    from engine.core import EngineCore

    patch(EngineCore, "_clear_asked", property(lambda self: True))
