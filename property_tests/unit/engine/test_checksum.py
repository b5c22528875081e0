"""A checksum says whether two tensors hold the same bytes in the same places."""

from __future__ import annotations

import pytest
import torch

from engine import weights
from engine.weights import checksum

MASK = (1 << 64) - 1


def splitmix64(state: int) -> int:
    z = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def in_words(data: bytes) -> str:
    """As its docstring says, one word at a time."""
    data += bytes(-len(data) % 8)
    words = [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]
    keys = [splitmix64((index + 1) * 0x9E3779B97F4A7C15 & MASK) for index in range(len(words))]
    return f"{sum(splitmix64((word + key) & MASK) for word, key in zip(words, keys, strict=True)) & MASK:016x}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (16, 4)])
def test_it_is_the_sum_of_mixed_words(dtype, shape, monkeypatch):
    monkeypatch.setattr(weights, "_CHECKSUM_WORDS", 4)
    tensor = (torch.arange(1, 65).reshape(-1)[: torch.Size(shape).numel()].reshape(shape) * 37).to(dtype)
    assert checksum(tensor) == in_words(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def test_a_bit_a_swap_and_a_shift_each_change_it():
    ones = torch.tensor([1.0, -1.0] * 32)
    tensor = ones.reshape(8, 8)
    other = tensor.clone()
    other.view(torch.int32)[7, 7] ^= 1
    swapped = tensor.clone()
    swapped[0, 0], swapped[0, 1] = tensor[0, 1], tensor[0, 0]
    found = {checksum(one) for one in (tensor, other, swapped, tensor.roll(1, 1), torch.zeros(8, 8), torch.zeros(9, 8))}
    assert len(found) == 6


def test_a_view_counts_by_its_own_order():
    tensor = torch.randn(6, 4)
    assert checksum(tensor.T) == checksum(tensor.T.contiguous()) != checksum(tensor)
    assert checksum(tensor[1:, 1:]) == checksum(tensor[1:, 1:].clone())
