"""Asynchronous scheduling: one step in flight while the next is scheduled; its tokens come one step late, each once."""

from __future__ import annotations

from functools import partial

import pytest

from harness.events import (
    Committed,
    Delivered,
    Dropped,
    Finished,
    Landed,
    Launched,
    Output,
    PauseEffective,
    Preempted,
    Resumed,
    Returned,
    Stored,
    VersionSpan,
)
from harness.model import Profile
from harness.operations import Abort, IsPaused, ResetPrefixCache, StartWeightUpdate, UpdateWeightVersion


@pytest.fixture
def engine(engine):
    return partial(engine, async_scheduling=True)


@pytest.fixture
def in_flight(engine):
    """r1 and r2 run; step 2 of both is in flight, and step 1 has landed."""
    engine = engine()
    engine.submit("r1", (1, 2))
    engine.submit("r2", (5, 6))
    engine.steps(2)
    return engine


def flow(events):
    """Launches and landings: +N, -N."""
    return [
        f"+{event.step}" if isinstance(event, Launched) else f"-{event.step}" for event in events if isinstance(event, Launched | Landed)
    ]


def placeholders(engine):
    state = engine.model.state()
    return {request.id: request.num_output_placeholders for request in (*state.running, *state.waiting)}


def calls_returned(events):
    return [(event.op, event.error.code if event.error else None) for event in events if isinstance(event, Returned)]


# Steps.


def test_one_step_is_in_flight_while_the_next_is_scheduled(engine, only):
    engine = engine()
    engine.submit("r1", (1, 2), max_tokens=3)
    assert [flow(engine.step()) for _ in range(4)] == [["+1"], ["+2", "-1"], ["+3", "-2"], ["-3"]]
    assert not engine.model.has_work()


def test_a_token_comes_one_step_late_and_its_placeholder_is_computed_meanwhile(engine):
    engine = engine()
    engine.submit("r1", (1, 2))
    engine.step()
    (r1,) = engine.model.state().running
    assert (r1.output, r1.num_computed_tokens, r1.num_output_placeholders) == ((), 2, 1)
    engine.step()
    (r1,) = engine.model.state().running
    assert (r1.output, r1.num_computed_tokens, r1.num_output_placeholders) == ((102,), 3, 1)


def test_no_step_is_launched_for_a_request_whose_last_token_is_in_flight(in_flight, only):
    engine = in_flight
    engine.submit("r3", (9,), max_tokens=1)
    engine.step()
    (launched,) = only(engine.step(), Launched)
    assert [row.request for row in launched.batch] == ["r1", "r2"]
    assert "r3" not in engine.running


def test_a_chunk_of_a_prefill_follows_one_in_flight(engine, only):
    engine = engine(max_num_batched_tokens=4)
    engine.submit("r1", range(10), max_tokens=2)
    events = engine.drain()
    assert [[tuple(row) for row in launched.batch] for launched in only(events, Launched)] == [
        [("r1", 0, 4)],
        [("r1", 4, 4)],
        [("r1", 8, 2)],
        [("r1", 10, 1)],
    ]
    assert [len(landed.sampled) for landed in only(events, Landed)] == [0, 0, 1, 1]


def test_the_token_after_an_end_of_sequence_is_dropped(engine, only):
    engine = engine(eos_token_ids=(7,))
    engine.submit("r1", (1, 2))
    engine.steps(2)
    events = engine.step(r1=7) + engine.step(r1=8)
    assert flow(events) == ["+3", "-2", "-3"]
    assert only(events, Finished, Dropped)[1:] == [Dropped(step=3, request="r1", why="finished")]
    assert only(events, Delivered) == [Delivered(outputs=(Output("r1", 1, (7,), "stop"),))]


def test_a_block_is_published_when_its_last_token_is_known(engine, only):
    engine = engine()
    engine.submit("r1", (1, 2, 3), max_tokens=4)
    events = [engine.step() for _ in range(5)]
    assert flow(events[1]) == ["+2", "-1"] and not only([*events[0], *events[1]], Stored), "step 2 fills block 0 with a token not known yet"
    (launched,) = only(events[2], Launched)
    (stored,) = only(events[2], Stored)
    assert events[2].index(stored) < events[2].index(launched), "step 3 is composed, and step 1 has told what block 0 holds"


def test_a_block_that_its_last_steps_filled_is_published_when_the_token_lands_before_the_request_ends(engine, only):
    engine = engine()
    engine.submit("r1", (1, 2, 3), max_tokens=2)
    engine.steps(2)
    events = engine.step()
    assert [type(event) for event in events[:3]] == [Landed, Stored, Finished]
    assert not only(events, Launched)


# Preemption.


@pytest.fixture
def preempted(engine):
    """Step 1 is in flight for both, and for step 2 there is one block: r2, the last, gives way. What that turn told."""
    engine = engine(num_blocks=3)
    engine.submit("r1", range(4), max_tokens=6)
    engine.submit("r2", range(20, 24), max_tokens=5)
    engine.step()
    return engine, engine.step()


def test_a_preemption_under_pressure_delivers_the_token_in_flight(preempted, only):
    engine, events = preempted
    (launched,), (landed,) = only(events, Launched), only(events, Landed)
    assert [event.request for event in only(events, Preempted)] == ["r2"]
    assert [row.request for row in launched.batch] == ["r1"]
    assert [token.request for token in landed.sampled] == ["r1", "r2"]
    assert placeholders(engine) == {"r1": 1, "r2": 0}
    (r2,) = engine.model.state().waiting
    assert (r2.status, r2.num_computed_tokens, r2.blocks) == ("preempted", 0, ())
    given = [
        output for event in engine.drain() for output in (event.outputs if isinstance(event, Delivered) else ()) if output.request == "r2"
    ]
    assert [output.first for output in given] == list(range(len(r2.output), 5))


def test_the_token_in_flight_may_end_a_preempted_request(engine, only):
    engine = engine(num_blocks=3)
    engine.submit("r1", range(8), max_tokens=4)
    engine.submit("r2", range(20, 24), max_tokens=1)
    engine.step()
    events = engine.step()
    assert [event.request for event in only(events, Preempted)] == ["r2"]
    assert only(events, Finished) == [
        Finished(request="r2", reason="length", prompt_tokens=4, output_tokens=1, spans=(VersionSpan("default", 0, 1),))
    ]
    assert (engine.running, engine.waiting) == (["r1"], [])


def test_when_all_wait_for_tokens_in_flight_nothing_is_launched(engine, only):
    engine = engine()
    engine.submit("r1", (1, 2), max_tokens=2)
    engine.submit("r2", (5, 6), max_tokens=1)
    engine.steps(2)
    assert engine.model.launch_due, "r1 runs"
    assert engine.model.schedule() == []
    assert engine.model.landing_due and not engine.model.launch_due


# Aborts and pauses.


def test_the_token_in_flight_of_an_aborted_request_is_dropped_once(in_flight, only):
    engine = in_flight
    events = engine.abort("r2") + engine.drain()
    assert only(events, Dropped) == [Dropped(step=2, request="r2", why="aborted")]
    assert only(events, Delivered)[0] == Delivered(outputs=(Output("r2", 1, (), "abort"),))


def test_a_token_in_flight_does_not_reach_a_new_request_of_the_same_id(in_flight, only):
    engine = in_flight
    engine.abort("r2")
    engine.submit("r2", (9, 9))
    events = engine.step()
    (landed,) = only(events, Landed)
    assert [token.request for token in landed.sampled] == ["r1"] and only(events, Dropped)
    assert placeholders(engine) == {"r1": 1, "r2": 1}


@pytest.mark.parametrize("clear_cache", [False, True])
def test_keep_is_effective_when_the_step_in_flight_has_landed_and_loses_nothing(in_flight, only, clear_cache):
    engine = in_flight
    assert not only(engine.pause("keep", clear_cache=clear_cache), PauseEffective, Returned)
    assert engine.model.state().pause_pending
    events = engine.step()
    assert flow(events) == ["-2"] and not only(events, Dropped)
    assert calls_returned(events) == [(2, None)] and isinstance(events[-2], PauseEffective)
    assert placeholders(engine) == {"r1": 0, "r2": 0} and not engine.model.has_work()
    assert [request.output for request in (*engine.model.state().running, *engine.model.state().waiting)] == [(102, 103)] * 2


def test_abort_ends_all_at_once_and_is_effective_when_their_step_has_landed(in_flight, only):
    engine = in_flight
    events = engine.pause("abort")
    assert [event.request for event in only(events, Finished)] == ["r1", "r2"] and not only(events, PauseEffective)
    events = engine.step()
    assert events[:3] == [
        Landed(step=2, sampled=()),
        Dropped(step=2, request="r1", why="aborted"),
        Dropped(step=2, request="r2", why="aborted"),
    ]
    assert calls_returned(events) == [(2, None)]


def test_wait_is_effective_when_the_last_step_has_landed(in_flight, only):
    engine = in_flight
    engine.pause("wait")
    events = engine.drain()
    assert only(events, PauseEffective) and not only(events, Dropped)
    assert [type(event) for event in events[-3:]] == [Delivered, PauseEffective, Returned]


def test_is_paused_is_true_while_keep_is_pending_and_weights_may_not_change_yet(in_flight, error):
    engine = in_flight
    engine.pause("keep")
    assert engine.call(IsPaused())[-1].answer == {"is_paused": True}
    assert error(engine.swap("v2")) == "conflict"
    assert error(engine.call(StartWeightUpdate(allow_unpaused=True))) == "conflict"
    assert error(engine.call(ResetPrefixCache())) == "busy"


# Calls that meet while keep or abort is pending.


def test_resume_over_a_pending_keep_goes_on_and_the_keep_fails(in_flight):
    engine = in_flight
    engine.pause("keep", clear_cache=True)
    events = engine.resume()
    assert calls_returned(events) == [(2, "superseded"), (3, None)] and any(isinstance(event, Resumed) for event in events)
    assert flow(engine.step()) == ["+3", "-2"]


def test_the_same_mode_again_joins_a_pending_keep_and_clear_wins(in_flight, only):
    engine = in_flight
    engine.pause("keep", clear_cache=True)
    engine.pause("keep", clear_cache=False)
    events = engine.step()
    assert calls_returned(events) == [(2, None), (3, None)]
    assert only(events, PauseEffective) == [PauseEffective(mode="keep", clear_cache=True)]


def test_wait_over_a_pending_keep_runs_all_to_the_end_and_both_return_then(in_flight, only):
    engine = in_flight
    engine.pause("keep")
    engine.pause("wait")
    events = engine.drain()
    assert len(only(events, Finished)) == 2
    assert calls_returned(events) == [(2, None), (3, None)]


def test_abort_over_a_pending_keep_overrides_and_both_return_when_quiet(in_flight, only):
    engine = in_flight
    engine.pause("keep")
    assert len(only(engine.pause("abort"), Finished)) == 2
    assert calls_returned(engine.step()) == [(2, None), (3, None)]


@pytest.mark.parametrize("mode", ["keep", "wait"])
def test_keep_or_wait_over_a_pending_abort_joins_it_and_sets_its_mode(in_flight, only, mode):
    engine = in_flight
    engine.pause("abort")
    engine.submit("late", (3,), max_tokens=1)
    engine.pause(mode)
    events = engine.drain()
    assert calls_returned(events) == [(2, None), (4, None)]
    assert [event.mode for event in only(events, PauseEffective)] == [mode]
    assert engine.waiting == (["late"] if mode == "keep" else [])


def test_keep_over_a_pending_wait_freezes_and_the_wait_fails(in_flight):
    engine = in_flight
    engine.pause("wait")
    assert calls_returned(engine.pause("keep")) == [(2, "superseded")]
    assert flow(engine.drain()) == ["-2"]


# Weights.


def test_a_token_belongs_to_the_weights_that_its_step_was_launched_on(in_flight, only):
    engine = in_flight
    engine.call(UpdateWeightVersion(version="v2", allow_unpaused=True))
    engine.step()
    assert engine.model.token_versions("r1") == ("default", "default")
    engine.step()
    assert engine.model.token_versions("r1") == ("default", "default", "v2")


def test_after_keep_and_new_weights_every_later_token_is_of_the_new_ones(in_flight, only):
    engine = in_flight
    engine.pause("keep", clear_cache=True)
    engine.step()
    assert only(engine.swap("v2"), Committed)
    engine.resume()
    spans = {event.request: event.spans for event in engine.drain() if isinstance(event, Finished)}
    assert spans == {request: (VersionSpan("default", 0, 2), VersionSpan("v2", 2, 8)) for request in ("r1", "r2")}


def test_engines_that_make_empty_steps_launch_them_ahead_as_well(engine, only):
    engine = engine(profile=Profile(name="empty", empty_steps=True))
    engine.submit("r1", (1, 2), max_tokens=1)
    turns = [engine.step() for _ in range(4)]
    assert [flow(turn) for turn in turns] == [["+1"], ["+2", "-1"], ["+3", "-2"], ["-3"]]
    assert [launched.batch for turn in turns[1:] for launched in only(turn, Launched)] == [(), ()]
    assert not engine.model.has_work()


def test_abort_all_of_a_request_that_waits_drops_nothing(engine, only):
    engine = engine(max_num_seqs=1)
    engine.submit("r1", (1, 2))
    engine.submit("r2", (5, 6))
    engine.steps(2)
    events = engine.call(Abort(ids="all")) + engine.drain()
    assert [event.request for event in only(events, Dropped)] == ["r1"]
