"""Asynchronous scheduling, whatever is asked and in whatever order: replay, model and invariants read a log alike.

The model writes the log; a replay of it must be in the model's state after every transaction, every invariant must
hold, and the file must give back what was written. Pools have 4 to 12 blocks, so that steps are in flight over preemptions.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from harness.backends.sim import SimBackend
from harness.codec import Codec
from harness.conformance import Explainer
from harness.events import Called, Closed, Dropped, Entry, Preempted
from harness.fuzz.case import run_case
from harness.fuzz.generate import case_of
from harness.replay import Replay

SEEDS, CHUNKS = 60, 5
ROOT = Path(__file__).parents[2]


def transactions(log: Sequence[Entry]) -> Iterator[Sequence[Entry]]:
    """The operations and steps of a lockstep log: each step has a time of its own."""
    begin = 0
    for index, (_, t_ns, _, event) in enumerate(log):
        if index > begin and (isinstance(event, Called | Closed) or t_ns != log[index - 1].t_ns):
            yield log[begin:index]
            begin = index
    yield log[begin:]


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_replay_equals_the_model_after_every_transaction_and_all_holds(chunk: int) -> None:
    kinds: set[type] = set()
    for seed in range(chunk * SEEDS, (chunk + 1) * SEEDS):
        outcome = run_case(case_of(seed, engine={"async_scheduling": True}), SimBackend(), drain=False)
        assert outcome.clean, f"seed {seed}: {outcome.findings}"
        explainer, replay, writer, reader = Explainer(), Replay(), Codec(), Codec()
        for entries in transactions(outcome.entries):
            explainer.feed(entries)
            for entry in entries:
                replay.apply(entry)
            explainer.compare_state(replay.state())
            assert explainer.mismatch is None, f"seed {seed}: {explainer.mismatch}"
            events = tuple(entry.event for entry in entries)
            assert reader.decode(writer.encode(entries[0].t_ns, events)).events == events
        kinds.update(type(entry.event) for entry in outcome.entries)
    assert {Dropped, Preempted} <= kinds, "cases in which little happens prove little"


def test_every_scenario_of_modes_holds(tmp_path: Path) -> None:
    scenarios = sorted(map(str, (ROOT / "scenarios" / "modes").glob("*.yaml")))
    command = ["run", *scenarios, "--engine", "sim", "--set", "engine.async_scheduling=true", "--runs", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-m", "harness.cli", *command], env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    assert sum(line.startswith("holds ") for line in result.stdout.splitlines()) == len(scenarios)
