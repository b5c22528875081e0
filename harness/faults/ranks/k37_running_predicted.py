"""The coordinator says `running` when it forwards a start, which a paused engine ignores: the flag never falls."""

from __future__ import annotations

from functools import partial

from harness.faults.fault import Patch
from harness.ranks import shapes
from harness.ranks.protocol import Protocol

STANDS_FOR = "vllm#51481"
CAUGHT_BY = "flags-converge"
SHALLOW = True


def plant(patch: Patch) -> None:
    patch(shapes, "Protocol", partial(Protocol, predicts_running=True))
