"""What vLLM does otherwise, field by field, each with the value of our engine beside it; and which version does what."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.events import (
    Cleared,
    Failure,
    Finished,
    PauseEffective,
    PausePending,
    Received,
    Relabelled,
    Resumed,
    Returned,
    UpdateFailed,
    VersionSpan,
)
from harness.model import CAESURA, Profile
from harness.operations import (
    FinishWeightUpdate,
    ResetPrefixCache,
    StartWeightUpdate,
    UpdateWeights,
    UpdateWeightVersion,
    WeightSource,
)

APART = replace(CAESURA, name="apart", pauses_meet="apart")
RANKS = replace(APART, name="ranks", ranks_agree=True)
UNGUARDED = replace(CAESURA, name="unguarded", weights_need_pause=False)
SERVES_ON = replace(CAESURA, name="serves on", failed_update_stops=False)
LABELS_LATE = replace(CAESURA, name="labels late", labels_at_landing=True)
FITTED = replace(CAESURA, name="fitted", fits_model_len_to_pool=True)
SOURCE = WeightSource(original=True)
PAUSED = {"status": "paused"}


def returned(events):
    return [event for event in events if isinstance(event, Returned)]


def refused(events):
    """The code of the refusal with which the call returned, None if it succeeded."""
    error = returned(events)[-1].error
    return None if error is None else error.code


def waiting_for_r1(engine, profile):
    """An engine with two wait calls pending, the older one with clear_cache."""
    engine = engine(profile=profile)
    engine.submit("r1", (1,), max_tokens=2)
    engine.step()
    engine.pause("wait", clear_cache=True)
    events = engine.pause("wait", clear_cache=False)
    return engine, events


def test_merged_pauses_share_one_clear_and_return_in_order(engine):
    engine, events = waiting_for_r1(engine, CAESURA)
    assert events == [Received(op=2), PausePending(mode="wait", clear_cache=True)]
    assert [event for event in engine.step() if isinstance(event, Cleared | PauseEffective | Returned)] == [
        Cleared(tier="device", success=True, empty=True),
        PauseEffective(mode="wait", clear_cache=True),
        Returned(op=1, answer=PAUSED, error=None),
        Returned(op=2, answer=PAUSED, error=None),
    ]


def test_pauses_apart_complete_newest_first_each_with_its_own_clear(engine):
    engine, events = waiting_for_r1(engine, APART)
    assert events == [Received(op=2), PausePending(mode="wait", clear_cache=False)]
    assert [event for event in engine.step() if isinstance(event, Cleared | PauseEffective | Returned)] == [
        PauseEffective(mode="wait", clear_cache=False),
        Returned(op=2, answer=PAUSED, error=None),
        Cleared(tier="device", success=True, empty=True),
        Returned(op=1, answer=PAUSED, error=None),
    ]


def test_keep_supersedes_a_merged_wait(engine):
    engine, _ = waiting_for_r1(engine, CAESURA)
    by_op = {event.op: event.error and event.error.code for event in returned(engine.pause("keep"))}
    assert by_op == {1: "superseded", 2: "superseded", 3: None}
    assert not engine.model.has_work()


def test_keep_over_a_wait_apart_completes_at_once_and_the_wait_when_the_loop_looks(engine):
    engine, _ = waiting_for_r1(engine, APART)
    assert engine.pause("keep") == [
        Received(op=3),
        PausePending(mode="keep", clear_cache=False),
        PauseEffective(mode="keep", clear_cache=False),
        Returned(op=3, answer=PAUSED, error=None),
    ]
    assert not engine.model.state().pause_pending
    events = engine.step()
    assert returned(events) == [Returned(op=2, answer=PAUSED, error=None), Returned(op=1, answer=PAUSED, error=None)]
    assert any(isinstance(event, Cleared) for event in events)
    assert not any(isinstance(event, PauseEffective) for event in events)
    assert not engine.model.has_work()


def test_a_call_that_is_taken_up_before_the_loop_looks_finds_the_wait_apart_still_pending(engine):
    engine, _ = waiting_for_r1(engine, APART)
    engine.pause("keep")
    assert returned(engine.resume()) == [Returned(op=4, answer={"status": "resumed"}, error=None)]
    assert [event.op for event in returned(engine.step())] == [2, 1], "when r1 has ended"


def test_a_look_is_taken_only_where_a_pause_waits_for_one(engine):
    engine, _ = waiting_for_r1(engine, APART)
    with pytest.raises(RuntimeError, match="look_due"):
        engine.model.look()


def test_resume_supersedes_a_merged_pause(engine):
    engine, _ = waiting_for_r1(engine, CAESURA)
    assert [event.error and event.error.code for event in returned(engine.resume())] == ["superseded", "superseded", None]


def test_resume_leaves_a_pause_apart_pending_until_nothing_is_left_to_run(engine):
    engine, _ = waiting_for_r1(engine, APART)
    assert engine.resume() == [Received(op=3), Resumed(), Returned(op=3, answer={"status": "resumed"}, error=None)]
    assert not engine.model.state().pause_pending
    events = engine.step()
    assert returned(events) == [Returned(op=2, answer=PAUSED, error=None), Returned(op=1, answer=PAUSED, error=None)]
    assert not any(isinstance(event, PauseEffective) for event in events)


def test_where_ranks_agree_a_pause_of_an_idle_engine_is_pending_until_a_look_and_resume_refused(engine):
    engine = engine(profile=RANKS)
    assert engine.pause("keep") == [Received(op=0), PausePending(mode="keep", clear_cache=False)]
    assert engine.model.state().pause_pending
    assert refused(engine.resume()) == "conflict"
    assert engine.step() == [PauseEffective(mode="keep", clear_cache=False), Returned(op=0, answer=PAUSED, error=None)]
    assert refused(engine.resume()) is None


def test_where_ranks_agree_the_last_step_completes_no_pause(engine):
    engine, _ = waiting_for_r1(engine, RANKS)
    assert not returned(engine.step())
    assert not engine.model.launch_due and engine.model.look_due
    assert [event.op for event in returned(engine.step())] == [2, 1]


@pytest.mark.parametrize(("preempts", "code"), [(True, None), (False, "busy")])
def test_whether_a_reset_takes_the_blocks_of_frozen_requests(engine, preempts, code):
    engine = engine(profile=replace(CAESURA, name="reset", reset_preempts_frozen=preempts))
    engine.submit("r1", (1,))
    engine.step()
    engine.pause("keep")
    assert refused(engine.call(ResetPrefixCache())) == code


@pytest.mark.parametrize(("profile", "code"), [(CAESURA, "conflict"), (UNGUARDED, None)], ids=["guarded", "unguarded"])
def test_whether_weights_and_labels_want_a_pause(engine, profile, code):
    engine = engine(profile=profile)
    assert refused(engine.call(StartWeightUpdate())) == code
    events = engine.call(UpdateWeightVersion(version="v2"))
    assert refused(events) == code
    assert (Relabelled(version="v2") in events) == (code is None)


@pytest.mark.parametrize(("profile", "code"), [(CAESURA, "conflict"), (UNGUARDED, None)], ids=["guarded", "unguarded"])
def test_whether_resume_and_wait_mind_an_open_session(engine, profile, code):
    engine = engine(profile=profile)
    engine.submit("r1", (1,))
    engine.pause("keep")
    engine.call(StartWeightUpdate())
    wait = engine.pause("wait")
    assert (refused(wait) if returned(wait) else None) == code
    assert refused(engine.resume()) == code


@pytest.mark.parametrize(("profile", "code"), [(CAESURA, "invalid"), (UNGUARDED, None)], ids=["counted", "uncounted"])
def test_whether_the_parts_of_a_session_are_counted(engine, profile, code):
    engine = engine(profile=profile)
    engine.pause("keep")
    engine.call(StartWeightUpdate())
    engine.call(UpdateWeights(source=SOURCE, part=1, of=2))
    assert refused(engine.call(UpdateWeights(source=SOURCE, part=1, of=3))) == code


@pytest.mark.parametrize(("profile", "stops"), [(CAESURA, True), (SERVES_ON, False)], ids=["stops", "serves on"])
def test_whether_a_failed_update_takes_the_engine_out_of_service(engine, profile, stops):
    engine = engine(profile=profile)
    engine.pause("keep")
    assert refused(engine.swap("v2", fails=True)) == "failed"
    state = engine.model.state()
    assert (state.out_of_service, state.update_open, state.weight_version) == (stops, False, "default")
    assert refused(engine.resume()) == ("out-of-service" if stops else None)


@pytest.mark.parametrize(("profile", "stops"), [(CAESURA, True), (SERVES_ON, False)], ids=["stops", "stays open"])
def test_whether_a_failed_finish_closes_the_session(engine, profile, stops):
    engine = engine(profile=profile)
    engine.pause("keep")
    engine.call(StartWeightUpdate())
    engine.call(UpdateWeights(source=SOURCE))
    events = engine.call(FinishWeightUpdate(version="v2", fails=True))
    assert [event.wrote for event in events if isinstance(event, UpdateFailed)] == [True]
    state = engine.model.state()
    assert (state.out_of_service, state.update_open) == (stops, not stops)


def test_a_request_that_outgrows_the_pool_is_refused_or_ends_there(engine):
    prompt = tuple(range(1, 7))
    assert refused(engine(num_blocks=2).submit("r1", prompt, max_tokens=8)) == "invalid"
    fitted = engine(profile=FITTED, num_blocks=2)
    fitted.submit("r1", prompt, max_tokens=8)
    fitted.step()
    ended = [event for event in fitted.step() if isinstance(event, Finished)]
    assert [(event.reason, event.output_tokens) for event in ended] == [("length", 2)]
    assert refused(fitted.submit("r2", tuple(range(8)), max_tokens=1)) == "invalid"


@pytest.mark.parametrize(("uncut", "first"), [(True, 8), (False, 3)])
def test_whether_a_lone_request_is_held_to_the_threshold(engine, uncut, first):
    engine = engine(profile=replace(CAESURA, name="lone", lone_request_uncut=uncut), long_prefill_token_threshold=3)
    engine.submit("r1", tuple(range(8)))
    engine.step()
    assert engine.model.state().running[0].num_computed_tokens == first


@pytest.mark.parametrize(
    ("policy", "under_keep", "under_wait"), [(None, "block", "block"), ("queue", "park", "park"), ("reject-unless-keep", "park", "reject")]
)
def test_late_requests_follow_the_only_policy_that_an_engine_has(engine, policy, under_keep, under_wait):
    engine = engine(profile=replace(CAESURA, name="late", late_requests=policy), late_requests="block")
    engine.pause("keep")
    kept = returned(engine.submit("r1", (1,)))[-1]
    engine.abort("r1")
    engine.pause("wait")
    waited = returned(engine.submit("r2", (1,)))[-1]
    assert [
        f"{answer.answer['state'].removesuffix('ed')}" if answer.answer else answer.error.code.removesuffix("ed")
        for answer in (kept, waited)
    ] == [
        under_keep,
        under_wait,
    ]


@pytest.mark.parametrize("reports", [True, False])
def test_whether_a_finished_request_reports_its_spans(engine, reports):
    engine = engine(profile=replace(CAESURA, name="spans", reports_spans=reports))
    engine.submit("r1", (1,), max_tokens=1)
    ended = [event for event in engine.step() if isinstance(event, Finished)]
    assert [bool(event.spans) for event in ended] == [reports]


def test_what_changed_from_version_to_version():
    named = {version: Profile.named(f"vllm-0.{version}") for version in range(26, 34)}
    assert [named[v].uncached_freed_to for v in (26, 27, 28)] == ["head", "tail", "head"]
    assert [named[v].lone_request_uncut for v in (30, 31)] == [False, True]
    assert [named[v].reports_spans for v in (31, 32)] == [False, True]
    assert [named[v].late_requests for v in (32, 33)] == ["queue", "reject-unless-keep"]


def test_a_rank_among_others_has_a_profile_where_one_was_checked():
    of_rank = Profile.named("vllm-0.32").in_waves
    assert of_rank is not None and of_rank.ranks_agree
    assert [Profile.named(f"vllm-0.{version}").in_waves for version in (31, 33)] == [None, None]


def test_a_refusal_is_a_failure_in_words(engine):
    error = returned(engine(profile=SERVES_ON).call(FinishWeightUpdate()))[-1].error
    assert isinstance(error, Failure) and "call start_weight_update first" in error.message


@pytest.mark.parametrize(("profile", "first_of_v2"), [(CAESURA, 2), (LABELS_LATE, 1)])
def test_a_token_in_flight_is_labelled_by_its_launch_or_by_its_landing(engine, profile, first_of_v2):
    engine = engine(profile=profile, async_scheduling=True)
    engine.submit("r1", (1,), max_tokens=3)
    engine.steps(2)  # the first token has landed, the second is in flight
    engine.call(UpdateWeightVersion(version="v2", allow_unpaused=True))
    finished = next(event for event in engine.drain() if isinstance(event, Finished))
    assert finished.spans == (VersionSpan("default", 0, first_of_v2), VersionSpan("v2", first_of_v2, 3))
