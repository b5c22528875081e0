"""An abort counts the ids that it was given, those that ended before and unknown ones included."""

from __future__ import annotations

from typing import Any

from harness.faults.fault import Patch
from harness.operations import Abort

STANDS_FOR = "the kind of K40: an answer that is not what happened"
CAUGHT_BY = "api-truth"
SHALLOW = True


def plant(patch: Patch) -> None:
    from harness.backends.torch import TorchBackend

    right = TorchBackend._handlers[Abort]

    def abort(self: TorchBackend, op: int, operation: Abort) -> Any:
        answer = right(self, op, operation)
        return answer if operation.ids == "all" else {"aborted": len(operation.ids)}

    patch(TorchBackend, "_handlers", {**TorchBackend._handlers, Abort: abort})
