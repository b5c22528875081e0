"""Sleep and wake: what is given back, what may run meanwhile, and whose pause it was."""

from __future__ import annotations

import pytest

from harness.events import (
    Accepted,
    Asleep,
    Awake,
    Cleared,
    Committed,
    Finished,
    Launched,
    PauseEffective,
    PausePending,
    Preempted,
    Resumed,
    Returned,
    UpdateFailed,
)
from harness.operations import FinishWeightUpdate, IsPaused, IsSleeping, ResetPrefixCache, StartWeightUpdate, UpdateWeights, WeightSource

ORIGINAL = WeightSource(original=True)


def asleep(talk) -> tuple[int | None, tuple[str, ...]]:
    state = talk.model.state()
    return state.sleep_level, state.asleep


def paused(talk) -> str | None:
    return talk.model.state().pause_mode


def answers(events) -> list:
    return [event.answer for event in events if isinstance(event, Returned)]


@pytest.fixture
def busy(engine):
    """r1 and r2 are in the middle of their decoding."""
    talk = engine()
    talk.submit("r1", [1, 2, 3, 4, 5])
    talk.submit("r2", [6, 7, 8])
    talk.steps(2)
    return talk


def test_a_sleep_pauses_by_abort_clears_and_gives_memory_back_before_it_returns(busy, only):
    events = busy.sleep(1)
    kinds = [type(event) for event in only(events, PausePending, Finished, Cleared, PauseEffective, Asleep, Returned)]
    assert kinds == [PausePending, Finished, Finished, Cleared, PauseEffective, Asleep, Returned]
    assert only(events, Asleep) == [Asleep(level=1, tags=("kv_cache", "weights"))]
    assert answers(events) == [{"status": "sleeping"}]
    assert asleep(busy) == (1, ("kv_cache", "weights"))


def test_level_0_gives_nothing_back_and_keeps_the_cache(busy, only):
    events = busy.sleep(0, "keep")
    assert only(events, Asleep) == [Asleep(level=0, tags=())]
    assert not only(events, Cleared, Preempted)
    assert busy.running == ["r1", "r2"]
    assert not busy.model.has_work()


def test_a_sleep_without_a_mode_keeps_what_a_keep_pause_froze(busy, only):
    busy.pause("keep")
    events = busy.sleep(1)
    assert not only(events, Finished)
    assert only(events, PausePending) == [PausePending(mode="keep", clear_cache=True)]
    assert busy.waiting == ["r1", "r2"]


def test_a_sleep_without_a_mode_aborts_nobody_parked_since_an_abort(busy, only):
    busy.pause("abort")
    busy.submit("r3", [1, 2])
    assert not only(busy.sleep(1), Finished)
    assert busy.waiting == ["r3"]


def test_a_sleep_without_a_mode_runs_nobody_parked_since_a_wait(busy):
    busy.pause("wait")
    busy.drain()
    busy.submit("r3", [1, 2])
    busy.sleep(0)
    assert [request.parked for request in busy.model.state().waiting] == [True]
    assert not busy.model.has_work()


def test_a_full_wake_up_ends_the_pause_that_sleep_made(busy, only):
    busy.sleep(1, "keep")
    events = busy.wake_up()
    assert only(events, Awake, Resumed) == [Awake(tags=()), Resumed()]
    assert answers(events) == [{"status": "awake"}]
    assert paused(busy) is None and busy.model.has_work()


@pytest.mark.parametrize("when", ["before", "during", "superseded"])
def test_a_pause_that_was_asked_for_survives_the_wake_up(busy, only, when):
    if when == "before":
        busy.pause("keep")
    elif when == "superseded":
        busy.pause("wait")
    busy.sleep(1, "keep")
    if when == "during":
        busy.pause("keep")
    assert not only(busy.wake_up(), Resumed)
    assert paused(busy) == "keep"
    assert only(busy.resume(), Resumed)


def test_a_partial_wake_up_starts_nothing(busy, only, error):
    busy.sleep(1, "keep")
    events = busy.wake_up("weights")
    assert only(events, Awake, Resumed) == [Awake(tags=("kv_cache",))]
    assert answers(events) == [{"status": "sleeping"}]
    assert not busy.model.has_work()
    assert error(busy.resume()) == "conflict"
    assert only(busy.wake_up("kv_cache"), Resumed)


def test_waking_what_is_awake_does_nothing(busy, only):
    assert answers(busy.wake_up()) == [{"status": "awake"}]
    busy.sleep(1, "keep")
    busy.wake_up("weights")
    before = busy.model.state()
    assert not only(busy.wake_up("weights"), Awake)
    assert busy.model.state() == before


def test_only_a_call_without_tags_wakes_level_0(busy, only):
    busy.sleep(0, "keep")
    assert not only(busy.wake_up("weights"), Awake)
    assert only(busy.wake_up(), Awake, Resumed) == [Awake(tags=()), Resumed()]


def test_a_wake_up_leaves_a_sleep_that_is_pending(busy, only):
    busy.sleep(1, "wait")
    assert not only(busy.wake_up(), Awake, Resumed)
    assert asleep(busy) == (None, ())
    busy.drain()
    assert asleep(busy) == (1, ("kv_cache", "weights"))


def test_sleeping_again_gives_back_what_woke_and_keeps_the_higher_level(busy):
    busy.sleep(1, "keep")
    busy.wake_up("kv_cache")
    busy.sleep(0)
    assert asleep(busy) == (1, ("kv_cache", "weights"))
    busy.sleep(2)
    assert asleep(busy) == (2, ("kv_cache", "weights"))
    busy.sleep(1)
    assert asleep(busy) == (2, ("kv_cache", "weights"))


def test_sleep_calls_that_are_pending_together_return_together_at_the_deepest_level(busy, only):
    busy.sleep(0, "wait")
    busy.sleep(2)
    busy.pause("wait")
    events = busy.drain()
    assert only(events, Asleep) == [Asleep(level=2, tags=("kv_cache", "weights"))]
    assert answers(events) == [{"status": "paused"}, {"status": "sleeping"}, {"status": "sleeping"}], "pause calls return first"


def test_a_sleep_that_waits_is_superseded_by_keep_and_by_resume(busy, only):
    busy.sleep(1, "wait")
    (superseded,) = [event for event in busy.resume() if isinstance(event, Returned) and event.error is not None]
    assert superseded.error.code == "superseded"
    busy.sleep(2, "wait")
    busy.pause("keep")
    assert asleep(busy) == (None, ())


def test_what_needs_memory_is_refused_asleep_and_changes_nothing(busy, error):
    busy.sleep(1, "keep")
    before = busy.model.state()
    for refused in (busy.resume, lambda: busy.pause("wait"), lambda: busy.sleep(1, "wait"), lambda: busy.swap("v2")):
        assert error(refused()) == "conflict"
    assert error(busy.call(StartWeightUpdate(allow_unpaused=True))) == "conflict"
    assert busy.model.state() == before


def test_what_needs_none_works_asleep(busy, only, error):
    busy.sleep(1, "keep")
    assert answers(busy.submit("r3", [1, 2])) == [{"state": "parked"}]
    assert answers(busy.abort("r1")) == [{"aborted": 1}]
    assert error(busy.pause("keep")) is None
    assert answers(busy.call(ResetPrefixCache())) == [{"status": "reset"}]
    assert answers(busy.call(IsPaused())) == [{"is_paused": True}]
    assert answers(busy.call(IsSleeping())) == [{"is_sleeping": True}]


def test_weights_may_be_written_while_only_the_cache_sleeps(busy, error, only):
    busy.sleep(1, "keep")
    busy.wake_up("weights")
    assert only(busy.swap("v2"), Committed)
    assert error(busy.call(StartWeightUpdate())) is None
    assert error(busy.sleep(1)) == "conflict", "a session is open"


def test_after_level_2_the_engine_is_out_of_service_until_a_full_update(busy, error, only):
    busy.sleep(2, "keep")
    assert not busy.model.state().out_of_service, "nobody can tell before the weights wake"
    busy.wake_up("weights")
    assert busy.model.state().out_of_service
    busy.call(StartWeightUpdate())
    busy.call(UpdateWeights(source=ORIGINAL, part=1, of=2))
    assert error(busy.call(FinishWeightUpdate())) == "conflict"
    busy.call(UpdateWeights(source=ORIGINAL, part=2, of=2))
    busy.call(FinishWeightUpdate())
    assert not busy.model.state().out_of_service
    assert only(busy.wake_up(), Resumed)


def test_after_level_2_and_a_full_wake_up_the_update_ends_the_pause(engine, error, only):
    talk = engine(late_requests="block")
    talk.submit("r1", [1, 2, 3])
    talk.step()
    talk.sleep(2, "keep")
    talk.submit("r2", [4, 5])
    assert not only(talk.wake_up(), Resumed)
    assert error(talk.resume()) == "out-of-service"
    assert paused(talk) == "keep"
    events = talk.swap("v2")
    assert only(events, Committed, Resumed, Accepted) == [Committed(version="v2"), Resumed(), Accepted(request="r2", parked=False)]


def test_a_wake_up_in_a_session_waits_for_its_end(busy, only):
    busy.sleep(1, "keep")
    busy.wake_up("weights")
    busy.call(StartWeightUpdate())
    busy.call(UpdateWeights(source=ORIGINAL))
    assert not only(busy.wake_up(), Resumed)
    assert only(busy.call(FinishWeightUpdate()), Committed, Resumed) == [Committed(version="default"), Resumed()]


def test_an_update_that_fails_does_not_end_the_pause(busy, only):
    busy.sleep(1, "keep")
    busy.wake_up("weights")
    busy.call(StartWeightUpdate())
    busy.call(UpdateWeights(source=ORIGINAL, fails=True))
    assert not only(busy.wake_up(), Resumed)
    assert only(busy.swap("v2", fails=True), UpdateFailed, Resumed)[-1] != Resumed()
    assert only(busy.swap("v2"), Resumed)


def test_a_sleep_lands_the_step_in_flight_before_it_gives_memory_back(engine, only):
    talk = engine(async_scheduling=True)
    talk.submit("r1", [1, 2, 3])
    talk.steps(2)
    assert not only(talk.sleep(1, "keep"), Asleep)
    assert not only(talk.wake_up(), Awake)
    assert only(talk.step(), Asleep, Launched) == [Asleep(level=1, tags=("kv_cache", "weights"))]
