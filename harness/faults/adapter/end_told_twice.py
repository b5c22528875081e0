"""A request's last output is delivered twice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from harness.events import Delivered
from harness.faults.fault import Patch

STANDS_FOR = "the kind of K09: a dead request touched later"
CAUGHT_BY = "token-conservation"
SHALLOW = True


def plant(patch: Patch) -> None:
    from harness.backends.torch import TorchBackend

    right = TorchBackend._deliveries

    def deliveries(self: TorchBackend) -> Iterator[Any]:
        for delivered in right(self):
            assert isinstance(delivered, Delivered)
            yield delivered
            if ends := tuple(output for output in delivered.outputs if output.finish_reason):
                yield Delivered(outputs=ends)

    patch(TorchBackend, "_deliveries", deliveries)
