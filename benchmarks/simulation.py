"""What simulating costs: steps, tokens and simulated seconds per second of CPU time, for workloads of scenarios/workloads/.

Bare: nobody listens. Judged: the log written, every invariant judged, situations counted, as `caesura run` does.

    python benchmarks/simulation.py
"""

from __future__ import annotations

import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import simpy

from harness.backends import make_backend
from harness.events import Entry
from harness.execute import Listener
from harness.scenario import Scenario, load_scenario
from harness.simulation.figures import Figures, figures_of
from harness.simulation.simulation import Simulation
from harness.trial import opened_event, run_trial

WORKLOADS = Path(__file__).parents[1] / "scenarios" / "workloads"
NAMES = ("pipelinerl_7b", "trl_small", "verl_7b_dapo")
ROUNDS = 5


class Rate(NamedTuple):
    """Of the median round, in CPU time: other processes of the machine do not count."""

    seconds: float
    figures: Figures

    def __str__(self) -> str:
        found = self.figures
        return (
            f"{found.steps / self.seconds:,.0f} steps/s, {found.tokens / self.seconds:,.0f} tokens/s, "
            f"{found.duration_ns / 1e9 / self.seconds:.2f} simulated seconds/s"
        )


def bare(scenario: Scenario) -> None:
    backend = make_backend("sim")
    opened = opened_event(scenario.engine, backend, backend.start(scenario.engine), digest="", seed=0)
    Simulation(scenario, []).run(opened)


def judged(scenario: Scenario) -> Sequence[Entry]:
    """The log, after it was written and judged."""
    backend = make_backend("sim")

    def drive(listeners: Sequence[Listener]) -> Simulation:
        return Simulation(scenario, listeners)

    with tempfile.TemporaryDirectory() as folder:
        return run_trial(scenario, backend, backend.start(scenario.engine), Path(folder), drive=drive).entries


def measure(run: Callable[[Scenario], object], scenario: Scenario, figures: Figures) -> Rate:
    seconds = []
    for _ in range(ROUNDS):
        began = time.process_time()
        run(scenario)
        seconds.append(time.process_time() - began)
    return Rate(statistics.median(seconds), figures)


def main() -> None:
    print(f"machine: {platform.platform()}, {platform.machine()}")
    print(f"versions: Python {platform.python_version()}, simpy {simpy.__version__}")
    print(f"command: python benchmarks/simulation.py (median of {ROUNDS} rounds)")
    for name in NAMES:
        scenario = load_scenario(WORKLOADS / f"{name}.yaml")
        assert scenario.workload is not None
        figures = figures_of(judged(scenario), scenario.workload)
        running = figures.tokens / figures.steps
        print(f"{name}: {figures.steps:,} steps of {running:.0f} tokens, {figures.duration_ns / 1e9:.2f} s simulated")
        print(f"  bare    {measure(bare, scenario, figures)}")
        print(f"  judged  {measure(judged, scenario, figures)}")


if __name__ == "__main__":
    main()
