"""Every token reaches its client as another one. A drill that does not see this sees nothing, and is void."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from harness.events import Delivered
from harness.faults.fault import Patch

STANDS_FOR = "own: the canary"
CAUGHT_BY = "token-conservation"
SHALLOW = True


def plant(patch: Patch) -> None:
    from harness.backends.torch import TorchBackend

    right = TorchBackend._deliveries

    def deliveries(self: TorchBackend) -> Iterator[Any]:
        for delivered in right(self):
            assert isinstance(delivered, Delivered)
            outputs = (output._replace(tokens=tuple(token + 1 for token in output.tokens)) for output in delivered.outputs)
            yield Delivered(outputs=tuple(outputs))

    patch(TorchBackend, "_deliveries", deliveries)
