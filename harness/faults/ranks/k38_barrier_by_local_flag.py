"""On resume each rank decides by a flag of its own whether to enter the barrier."""

from __future__ import annotations

from functools import partial

from harness.faults.fault import Patch
from harness.ranks import shapes
from harness.ranks.protocol import Protocol

STANDS_FOR = "vllm#55229"
CAUGHT_BY = "idempotent-control"
SHALLOW = True


def plant(patch: Patch) -> None:
    patch(shapes, "Protocol", partial(Protocol, resume_asks_running=True))
