"""What a step costs in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from harness.events import Scheduled
from harness.scenario import Latency, Roofline

StepCost = Callable[[Sequence[Scheduled]], int]
"""Nanoseconds that the forward pass of a batch takes."""


def step_cost(latency: Latency) -> StepCost:
    """The scenario's latency model."""
    if latency.roofline is not None:
        return roofline(latency.roofline)
    constant = round(latency.step_ms * 1e6)
    return lambda batch: constant


def roofline(model: Roofline) -> StepCost:
    """The longer of moving and computing (Williams, Waterman, Patterson, CACM 52(4), 2009).

    A row that computes positions [first, first + count) reads the KV of all first + count positions once.
    """
    weights_ns = model.weights_gb / model.memory_gb_per_s * 1e9
    kv_ns = model.kv_kb_per_token / model.memory_gb_per_s * 1e3
    token_ns = model.gflop_per_token / model.compute_tflop_per_s * 1e6
    launch_ns = model.launch_us * 1e3

    def cost(batch: Sequence[Scheduled]) -> int:
        read = computed = 0
        for _, first, count in batch:
            read += first + count
            computed += count
        return round(launch_ns + max(weights_ns + kv_ns * read, token_ns * computed))

    return cost
