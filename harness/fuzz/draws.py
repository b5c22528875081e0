"""Where a generated case takes its choices from: one interface, so that a seeded loop and hypothesis share one generator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

Item = TypeVar("Item")

_MASK = (1 << 64) - 1


class Draws(Protocol):
    """A source of choices. 0 is the simplest choice: a source that shrinks moves towards it."""

    def below(self, bound: int) -> int:
        """A whole number from 0 to `bound` - 1; `bound` is at most 2**20."""
        ...


class Stream:
    """Choices from a seed: splitmix64 (Steele et al., OOPSLA 2014), the same on every machine and Python.

    A word of 64 bits serves several choices: it is read as digits of mixed radix as long as 20 bits are left over,
    so that no choice is biased by more than one in a million.
    """

    __slots__ = ("_left", "_state", "_word")

    def __init__(self, seed: int) -> None:
        self._state = seed * 0xD1342543DE82EF95 & _MASK
        self._word = 0
        self._left = 1

    def below(self, bound: int) -> int:
        if self._left < bound << 20:
            self._refill()
        self._left //= bound
        self._word, digit = divmod(self._word, bound)
        return digit

    def _refill(self) -> None:
        self._state = state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        mixed = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        self._word, self._left = mixed ^ (mixed >> 31), _MASK


def between(draws: Draws, low: int, high: int) -> int:
    """A whole number from `low` to `high`, both included."""
    return low + draws.below(high - low + 1)


def one_of(draws: Draws, items: Sequence[Item]) -> Item:
    return items[draws.below(len(items))]


def once_in(draws: Draws, times: int) -> bool:
    """True once in so many times."""
    return draws.below(times) == times - 1
