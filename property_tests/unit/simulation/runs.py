"""Small workloads, and what a simulation of one says."""

from __future__ import annotations

from typing import Any

from harness.backends.sim import SimBackend
from harness.conformance import explain
from harness.events import Called, Delivered, Entry, Finished
from harness.invariants import judge
from harness.scenario import EngineShape, Latency, Scenario, TimelineEntry, Workload
from harness.simulation.simulation import Simulation
from harness.trial import opened_event

SHAPE = {"block_size": 4, "num_blocks": 12, "max_model_len": 40, "max_num_seqs": 4, "max_num_batched_tokens": 16}
"""So small a pool that requests are preempted."""

WORKLOAD = {
    "rollouts": 24,
    "samples": 3,
    "arrivals": {"workers": 6},
    "prompt": {"median": 5, "p99": 12},
    "output": {"median": 8, "p99": 30},
}
TRAINER = {"batch": 6, "train_ms": 5, "mode": "keep", "clear_cache": True, "transfer_ms": 3}


def scenario(
    *,
    engine: dict[str, Any] | None = None,
    latency: dict[str, Any] | None = None,
    timeline: tuple[TimelineEntry, ...] = (),
    **workload: Any,
) -> Scenario:
    """The small workload, with these changes."""
    return Scenario(
        name="small",
        engine=EngineShape.model_validate({**SHAPE, **(engine or {})}),
        timeline=timeline,
        workload=Workload.model_validate({**WORKLOAD, **workload}),
        latency=Latency.model_validate(latency or {}),
    )


def simulate(scenario: Scenario, *, seed: int = 0, ties: int | None = None) -> list[Entry]:
    """The log of a simulation."""
    backend, entries = SimBackend(), []
    opened = opened_event(scenario.engine, backend, backend.start(scenario.engine), digest="", seed=seed)
    Simulation(scenario, [entries.extend], seed=seed, ties=ties).run(opened)
    return entries


def flaws(entries: list[Entry]) -> list[str]:
    """What is wrong with a log: invariants that are violated, and where the model parts from it."""
    found = [f"{judgement.invariant}: {judgement.reason}" for judgement in judge(entries) if judgement.status == "violated"]
    mismatch = explain(entries).mismatch
    return found + ([] if mismatch is None else [f"event {mismatch.seq}: {mismatch.sentence}"])


def submits(entries: list[Entry]) -> list[tuple[Entry, dict[str, Any]]]:
    """Every request that was handed in, with its call."""
    calls = [(entry, entry.event.operation) for entry in entries if isinstance(entry.event, Called)]
    return [(entry, operation["submit"]) for entry, operation in calls if "submit" in operation]


def calls_of(entries: list[Entry], by: str) -> list[tuple[int, str]]:
    """(time, verb) of each call of one process."""
    return [(entry.t_ns, *entry.event.operation) for entry in entries if isinstance(entry.event, Called) and entry.event.by == by]


def delivered(entries: list[Entry]) -> dict[str, int]:
    """Tokens handed to clients, by request."""
    counts: dict[str, int] = {}
    for entry in entries:
        if isinstance(entry.event, Delivered):
            for output in entry.event.outputs:
                counts[output.request] = counts.get(output.request, 0) + len(output.tokens)
    return counts


def finished(entries: list[Entry]) -> list[tuple[int, Finished]]:
    """(time, event) of each end of a request."""
    return [(entry.t_ns, entry.event) for entry in entries if isinstance(entry.event, Finished)]
