"""Steps per second of the bare model: 16 requests in steady decode on 512 blocks of 16 tokens.

A step is schedule and land, with all their events.

    python benchmarks/model_steps.py
"""

from __future__ import annotations

import platform
import statistics
import time
from typing import Literal, NamedTuple

import msgspec
import pydantic

from harness.model import EngineModel
from harness.operations import Prompt, Submit

REQUESTS = 16
ROUNDS = 15
STEPS = 400
READS = 1000


class Shape(NamedTuple):
    """The engine that is measured."""

    block_size: int = 16
    num_blocks: int = 512
    max_model_len: int = 512
    max_num_seqs: int = REQUESTS
    max_num_batched_tokens: int = 2048
    prefix_caching: bool = True
    long_prefill_token_threshold: int = 0
    late_requests: Literal["queue", "reject", "block"] = "queue"
    async_scheduling: bool = False
    host_blocks: int = 0


def next_token(request: str, position: int) -> int:
    return 16 + position % 240


def decoding(shape: Shape, *, requests: int, steps: int) -> EngineModel:
    """A model whose requests are prefilled and will not end within `steps`."""
    model = EngineModel(shape)
    for index in range(requests):
        prompt = Prompt(tokens=16, seed=index)
        model.apply(index, Submit(id=f"r{index}", prompt=prompt, max_tokens=steps + 2))
    model.schedule()
    model.land(next_token)
    return model


def steps_per_second() -> float:
    """Of one round of `STEPS` steps."""
    model = decoding(Shape(), requests=REQUESTS, steps=STEPS)
    began = time.perf_counter()
    for _ in range(STEPS):
        model.schedule()
        model.land(next_token)
    return STEPS / (time.perf_counter() - began)


def state_us() -> float:
    """Microseconds for reading the whole state: 4 requests, 32 blocks."""
    model = decoding(Shape(num_blocks=32, max_model_len=128), requests=4, steps=100)
    began = time.perf_counter()
    for _ in range(READS):
        model.state()
    return (time.perf_counter() - began) / READS * 1e6


def main() -> None:
    rates = sorted(steps_per_second() for _ in range(ROUNDS))
    print(f"machine: {platform.platform()}, {platform.machine()}")
    print(f"versions: Python {platform.python_version()}, msgspec {msgspec.__version__}, pydantic {pydantic.VERSION}")
    print("command: python benchmarks/model_steps.py")
    print(f"steps/s: {statistics.median(rates):,.0f} (median of {ROUNDS} rounds of {STEPS}; {rates[0]:,.0f} to {rates[-1]:,.0f})")
    print(f"state(): {state_us():.0f} us at 4 requests and 32 blocks")


if __name__ == "__main__":
    main()
