"""A reset clears the device and reports success for the host tier too, whose copies stay and are loaded again."""

from __future__ import annotations

from harness.faults.fault import Patch

STANDS_FOR = "vllm#42694"
CAUGHT_BY = "reset-truth"
SHALLOW = False
ENGINE = {"host_blocks": 6, "prefix_caching": True}


def plant(patch: Patch) -> None:
    from engine.host_tier import HostTier

    patch(HostTier, "clear", lambda self: None)
    patch(HostTier, "is_empty", property(lambda self: True))
