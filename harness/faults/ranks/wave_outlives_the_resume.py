"""A resume begins no new wave, so that a start sent during the pause reaches one rank before it and another after it."""

from __future__ import annotations

from functools import partial

from harness.faults.fault import Patch
from harness.ranks import shapes
from harness.ranks.protocol import Protocol

STANDS_FOR = "own, met when the protocol was modelled"
CAUGHT_BY = "deadlock"
SHALLOW = True


def plant(patch: Patch) -> None:
    patch(shapes, "Protocol", partial(Protocol, resume_keeps_wave=True))
