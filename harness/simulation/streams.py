"""Random streams: one for each use, so that more draws in one place change nothing in another."""

from __future__ import annotations

import hashlib
import math
import random
from statistics import NormalDist

from harness.scenario import Tail

_NORMAL = NormalDist()
_Z99 = _NORMAL.inv_cdf(0.99)


def stream(seed: int, name: str) -> random.Random:
    """The stream called `name` of a master seed: the same in every process and on every machine."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return random.Random(int.from_bytes(digest[:16], "big"))


def uniform(draws: random.Random) -> float:
    """A number between 0 and 1, neither of them included."""
    return (draws.getrandbits(52) + 0.5) / (1 << 52)


def length(draws: random.Random, tail: Tail) -> int:
    """A length in tokens, 1 or more: lognormal, by the inverse of its distribution."""
    sigma = math.log(tail.p99 / tail.median) / _Z99
    return max(1, round(tail.median * math.exp(sigma * _NORMAL.inv_cdf(uniform(draws)))))


def gap_ns(draws: random.Random, per_s: float) -> int:
    """The time to the next arrival of a Poisson process, in nanoseconds."""
    return round(-math.log(uniform(draws)) / per_s * 1e9)
