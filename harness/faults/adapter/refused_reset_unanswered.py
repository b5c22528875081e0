"""A reset that the engine refuses never returns."""

from __future__ import annotations

from typing import Any

from harness.events import Returned
from harness.faults.fault import Patch

STANDS_FOR = "the kind of K15 (sglang#22290): a call that waits for ever"
CAUGHT_BY = "api-truth"
SHALLOW = True


def plant(patch: Patch) -> None:
    from harness.backends.torch import TorchBackend

    right = TorchBackend.apply

    def apply(self: TorchBackend, *arguments: Any) -> list[Any]:
        events = right(self, *arguments)
        return [event for event in events if not (isinstance(event, Returned) and event.error and event.error.code == "busy")]

    patch(TorchBackend, "apply", apply)
