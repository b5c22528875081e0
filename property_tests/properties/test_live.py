"""Random cases in real time: whatever is asked of a live engine and in whatever order, the model explains its log, and every
invariant holds, of its rank and its clients together and of what clients alone saw."""

from __future__ import annotations

import pytest

from harness.backends import LiveBackend, make_live_backend
from harness.fuzz.case import Outcome, run_case
from harness.fuzz.generate import case_of
from harness.invariants.panel import CLIENT, Panel

CASES = 24


def flaws(outcome: Outcome) -> list[str]:
    """What was found, and what a judge of the client's log alone finds."""
    seen = [entry for entry in outcome.entries if entry.writer == CLIENT]
    from_outside = [violation for judgement in Panel(seen).finish() for violation in judgement.violations]
    return [f"{finding.id}: {finding.sentence} {finding.detail}" for finding in outcome.findings] + [
        f"from outside, {violation.invariant}: {violation.sentence}" for violation in from_outside
    ]


def found(backend: LiveBackend, engine: dict[str, object]) -> dict[int, list[str]]:
    outcomes = {seed: run_case(case_of(seed, engine=engine), backend) for seed in range(CASES)}
    return {seed: flaws(outcome) for seed, outcome in outcomes.items() if flaws(outcome)}


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_random_cases_on_our_engine(async_scheduling: bool) -> None:
    pytest.importorskip("torch")
    assert found(make_live_backend("torch-live-inproc"), {"async_scheduling": async_scheduling}) == {}
