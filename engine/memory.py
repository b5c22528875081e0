"""Memory of tensors that can be given back while the engine sleeps, and mapped again under the same tensors.

The tensors stay what they are, so the model, tied weights and whoever writes weights need not know: only their
storages go and come back, perhaps at other addresses.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

NOT_A_NUMBER = 0xFF
"""A byte that makes every floating-point number NaN: what wakes without contents must not be taken for weights."""


class Memory:
    """The storages of some tensors of one device; those that share one count once.

    Args:
        fill: each byte of memory that is mapped again without contents.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], *, fill: int) -> None:
        self._fill = fill
        storages = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
        self._storages = [(storage, storage.nbytes()) for storage in storages.values()]
        self._copies: list[torch.Tensor] | None = None
        self.is_mapped = True

    @property
    def num_bytes(self) -> int:
        """What the device holds of it now, in bytes."""
        return sum(storage.nbytes() for storage, _ in self._storages)

    def give_back(self, *, keep_copy: bool) -> None:
        """Let go of the device's memory; with `keep_copy` the contents move to the host. The device must be idle.

        Called again without `keep_copy`, lets go of the copy too.
        """
        if self.is_mapped:
            self._copies = [_to_host(storage) for storage, _ in self._storages] if keep_copy else None
            for storage, _ in self._storages:
                storage.resize_(0)
            self.is_mapped = False
            if any(storage.device.type == "cuda" for storage, _ in self._storages):
                torch.cuda.empty_cache()
        elif not keep_copy:
            self._copies = None

    def map_again(self) -> None:
        """Take memory again, with the contents that were kept, or filled."""
        if self.is_mapped:
            return
        for index, (storage, num_bytes) in enumerate(self._storages):
            storage.resize_(num_bytes)
            contents = _bytes_of(storage)
            if self._copies is None:
                contents.fill_(self._fill)
            else:
                contents.copy_(self._copies[index])
        self._copies = None
        self.is_mapped = True


def _to_host(storage: torch.UntypedStorage) -> torch.Tensor:
    contents = _bytes_of(storage)
    return torch.empty(contents.shape, dtype=torch.uint8, pin_memory=contents.device.type == "cuda").copy_(contents)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
