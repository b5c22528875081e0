"""Named tensors as raw buffers beside a message: typed by their specs, so that nothing has to be unpickled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from .connection import Buffer
from .messages import TensorSpec
from .weights import NamedTensors


def pack(tensors: NamedTensors) -> tuple[tuple[TensorSpec, ...], list[Buffer]]:
    """Specs and buffers of tensors, in their order. What is contiguous in host memory is not copied: it must not change meanwhile."""
    specs, buffers = [], []
    for name, tensor in tensors:
        host = tensor.detach().cpu().contiguous()
        specs.append(TensorSpec(name, str(host.dtype).removeprefix("torch."), tuple(host.shape)))
        buffers.append(host.reshape(-1).view(torch.uint8).numpy().data)
    return tuple(specs), buffers


def unpack(specs: Sequence[TensorSpec], buffers: Sequence[Buffer]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors again, one at a time, over the memory of the buffers; for reading only."""
    for (name, dtype, shape), buffer in zip(specs, buffers, strict=True):
        raw = torch.frombuffer(buffer, dtype=torch.uint8) if len(buffer) else torch.empty(0, dtype=torch.uint8)
        yield name, raw.view(getattr(torch, dtype)).reshape(shape)
