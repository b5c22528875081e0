"""Values between the host and the device, without anybody waiting.

A plain copy from or to a CUDA device waits until the device has done all that was asked of it before, and a step
that is launched while another is in flight must not. Copies from and to pinned memory do not wait; the allocator
of pinned memory keeps it until they are done.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def to_device(values: Sequence[int] | Sequence[Sequence[int]] | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Integers (int64), or a tensor of the host, on the device: in the order of its stream."""
    tensor = values if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=torch.int64)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class HostCopy:
    """A tensor on its way from the device to the host."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        self._tensor = tensor
        if tensor.device.type == "cuda":
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(tensor.device))

    def wait(self) -> torch.Tensor:
        """The tensor, on the host: waits for what the device was asked up to the copy, and for nothing later."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._tensor
