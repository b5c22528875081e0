"""A pause call that a resume overrode is answered as if it had paused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from harness.events import Returned
from harness.faults.fault import Patch

STANDS_FOR = "the kind of K40 (vllm#12284): success that did not happen"
CAUGHT_BY = "quiet-after-pause"
SHALLOW = False


def plant(patch: Patch) -> None:
    from harness.backends.torch import TorchBackend

    right = TorchBackend._superseded

    def superseded(self: TorchBackend) -> Iterator[Any]:
        for returned in right(self):
            assert isinstance(returned, Returned)
            yield Returned(op=returned.op, answer={"status": "paused"}, error=None)

    patch(TorchBackend, "_superseded", superseded)
