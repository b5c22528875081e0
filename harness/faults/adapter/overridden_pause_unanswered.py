"""A pause call that a later call overrode is never answered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from harness.faults.fault import Patch

STANDS_FOR = "the kind of K18 (tokenspeed#346)"
CAUGHT_BY = "quiet-after-pause"
SHALLOW = False


def plant(patch: Patch) -> None:
    from harness.backends.torch import TorchBackend

    right = TorchBackend._superseded

    def superseded(self: TorchBackend) -> Iterator[Any]:
        for _ in right(self):
            pass
        yield from ()

    patch(TorchBackend, "_superseded", superseded)
