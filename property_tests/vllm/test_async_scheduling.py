"""vLLM's own asynchronous scheduling, with a step in flight while the next is scheduled: what becomes of a token that comes late."""

from __future__ import annotations

import pytest

from harness.backends import make_backend
from harness.events import Called, Dropped, Landed, Launched, PauseEffective, PausePending, Preempted, Returned
from harness.fuzz.case import CONFORMANCE, Case, run_case
from harness.operations import Abort, Advance, IsPaused, Pause, Prompt, Step, Submit
from harness.scenario import EngineShape

from .differences import SCENARIOS, run

SHAPE = EngineShape(block_size=4, num_blocks=16, max_model_len=64, async_scheduling=True)
R1 = Submit(id="r1", prompt=Prompt(tokens=6), max_tokens=8)

pytestmark = pytest.mark.usefixtures("needs_vllm")


def events_of(*operations):
    """What happened on the scheduler, explained by the model, whose whole state was the same all along."""
    outcome = run_case(Case(engine=SHAPE, operations=operations), make_backend("vllm-scheduler"))
    assert outcome.finding(CONFORMANCE) is None, outcome.findings
    return [entry.event for entry in outcome.entries]


def kinds(events, *wanted):
    return [type(event) for event in events if isinstance(event, wanted)]


def test_the_first_turn_only_launches_and_a_later_one_lands_the_step_before():
    events = events_of(R1, Advance(steps=3))
    assert kinds(events, Launched, Landed)[:5] == [Launched, Launched, Landed, Launched, Landed]


def test_a_token_of_a_request_aborted_in_flight_is_dropped():
    events = events_of(R1, Advance(steps=2), Abort(ids=("r1",)))
    assert [(event.request, event.why) for event in events if isinstance(event, Dropped)] == [("r1", "aborted")]


def test_a_late_token_never_reaches_another_request_of_the_same_id():
    events = events_of(R1, Advance(steps=2), Abort(ids=("r1",)), R1, Advance(steps=2))
    dropped = next(place for place, event in enumerate(events) if isinstance(event, Dropped))
    landed = events[dropped - 1]
    assert isinstance(landed, Landed)
    assert landed.sampled == ()


def test_a_token_of_a_request_preempted_under_pressure_is_delivered(tmp_path):
    entries = run(SCENARIOS / "modes" / "preemption_small_pool.yaml", "vllm-scheduler", tmp_path, async_scheduling=True).entries
    events = [entry.event for entry in entries]
    place, victim = next((place, event.request) for place, event in enumerate(events) if isinstance(event, Preempted))
    landed = next(event for event in events[place:] if isinstance(event, Landed))
    assert victim in [sampled.request for sampled in landed.sampled]


def test_a_pause_is_pending_while_a_step_is_in_flight():
    events = events_of(R1, Step(), Pause(mode="keep"), IsPaused(), Step())
    assert kinds(events, Called, PausePending, Landed, PauseEffective, Returned)[:8] == [
        *(Called, Returned),  # submit
        *(Called, PausePending),
        *(Called, Returned),  # is_paused, between pending and effective
        *(Landed, PauseEffective),
    ]
