"""A paused rank heeds a wave start that comes late, and steps alone while the others are in the weight transfer."""

from __future__ import annotations

from functools import partial

from harness.faults.fault import Patch
from harness.ranks import shapes
from harness.ranks.protocol import Protocol

STANDS_FOR = "vllm#36594, #39366"
CAUGHT_BY = "collective-symmetry"
SHALLOW = True


def plant(patch: Patch) -> None:
    patch(shapes, "Protocol", partial(Protocol, heeds_starts_while_paused=True))
