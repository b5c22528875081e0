"""is_paused is false while a pause is pending."""

from __future__ import annotations

from typing import Any

from harness.faults.fault import Patch
from harness.operations import IsPaused

STANDS_FOR = "the kind of K37 (vllm#51481): a flag that is not what is"
CAUGHT_BY = "flags-converge"
SHALLOW = False


def plant(patch: Patch) -> None:
    from harness.backends.torch import TorchBackend

    def is_paused(self: TorchBackend, op: int, operation: IsPaused) -> dict[str, Any]:
        return {"is_paused": self._core.is_paused() and not self._core.pause_pending}

    patch(TorchBackend, "_handlers", {**TorchBackend._handlers, IsPaused: is_paused})
