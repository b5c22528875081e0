"""splitmix64 (Steele et al., "Fast splittable pseudorandom number generators", OOPSLA 2014) on tensors of int64, which wrap as it must."""

from __future__ import annotations

import torch


def mixed(z: torch.Tensor) -> torch.Tensor:
    """The generator's output for each state: a bijection that scatters every bit."""
    z = (z ^ _shifted(z, 30)) * signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * signed(0x94D049BB133111EB)
    return z ^ _shifted(z, 31)


def states(start: int, first: int, count: int, device: torch.device) -> torch.Tensor:
    """The states number `first` to `first + count - 1` that follow `start`: int64 [count]. The first one after it has number 1."""
    return torch.arange(first, first + count, device=device) * signed(0x9E3779B97F4A7C15) + start


def signed(word: int) -> int:
    """The signed number of the same 64 bits."""
    return word - (1 << 64) if word >> 63 else word


def _shifted(z: torch.Tensor, count: int) -> torch.Tensor:
    """Shifted right without its sign."""
    return (z >> count) & ((1 << (64 - count)) - 1)
