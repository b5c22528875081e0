"""Ranks agree to stop though one has taken up control calls that another has not."""

from __future__ import annotations

from functools import partial

from harness.faults.fault import Patch
from harness.ranks import shapes
from harness.ranks.protocol import Protocol

STANDS_FOR = "own, met when the protocol was modelled"
CAUGHT_BY = "idempotent-control"
SHALLOW = True


def plant(patch: Patch) -> None:
    patch(shapes, "Protocol", partial(Protocol, agrees_across_calls=True))
