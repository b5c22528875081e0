"""A resume leaves the requests that a rank parked where they are."""

from __future__ import annotations

from functools import partial

from harness.faults.fault import Patch
from harness.ranks import shapes
from harness.ranks.protocol import Protocol

STANDS_FOR = "the kind of K06 (vllm#45326), on ranks"
CAUGHT_BY = "one-ending"
SHALLOW = True


def plant(patch: Patch) -> None:
    patch(shapes, "Protocol", partial(Protocol, resume_forgets_parked=True))
