"""An update lets go of a tensor's memory and takes other memory for it: a captured graph goes on reading the old one."""

from __future__ import annotations

from typing import Any

from harness.faults.fault import Patch

STANDS_FOR = "own: storage addresses that graphs captured"
CAUGHT_BY = "weight-equality"
SHALLOW = True


def plant(patch: Patch) -> None:
    from engine.weights import WeightTarget

    right = WeightTarget.write

    def write(self: WeightTarget, name: str, tensor: Any) -> int:
        storage = self._tensors[name].untyped_storage()
        num_bytes = storage.nbytes()
        vars(self).setdefault("old", []).append(self._tensors[name].clone())  # so that its place is not free
        storage.resize_(0)
        vars(self)["old"].append(tensor.clone())
        storage.resize_(num_bytes)
        return right(self, name, tensor)

    patch(WeightTarget, "write", write)
