"""A pause call is answered when it is taken up, not when the engine is quiet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from harness.events import Returned
from harness.faults.fault import Patch

STANDS_FOR = "the kind of K21 (vllm#52914): paused is said too early"
CAUGHT_BY = "quiet-after-pause"
SHALLOW = False


def plant(patch: Patch) -> None:
    from harness.backends.torch import TorchBackend

    right = TorchBackend._complete_pause

    def complete_pause(self: TorchBackend) -> Iterator[Any]:
        yield from right(self)
        for op in list(self._pauses):
            del self._pauses[op]
            yield Returned(op=op, answer={"status": "paused"}, error=None)

    patch(TorchBackend, "_complete_pause", complete_pause)
