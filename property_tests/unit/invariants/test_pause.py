"""no-step-while-paused and quiet-after-pause."""

from __future__ import annotations

from harness.events import (
    Landed,
    Launched,
    PartReceived,
    PauseEffective,
    PausePending,
    Received,
    Resumed,
    Sampled,
    UpdateFailed,
    UpdateStarted,
)
from harness.operations import Pause, Resume, SwapWeights

from .logs import NEW_WEIGHTS, Timeline, said

STEP, QUIET = "no-step-while-paused", "quiet-after-pause"


def running(**options: int) -> Timeline:
    return Timeline(**options).submit("r1", [20, 21]).admit("r1", [0]).step(("r1", 0, 2), r1=7)


def test_nothing_runs_under_keep_and_all_goes_on_after_resume():
    log = running().pause("keep").effective("keep").resume().step(("r1", 2, 1), r1=8)
    assert log.holds(STEP) and log.holds(QUIET)


def test_a_step_under_an_effective_pause():
    log = running().pause("keep").effective("keep")
    effective = log.last(PauseEffective)
    violation = log.step(("r1", 2, 1), r1=8).step(("r1", 3, 1), r1=9).violation(STEP)
    assert said(violation) == (
        "step 2 was launched while paused by keep",
        "no forward before `resumed` or a later `wait`",
        "a step of [r1]",
    )
    assert [(cause.seq, cause.what) for cause in violation.cause] == [(effective, "pause effective")]


def test_an_empty_step_runs_no_forward():
    assert running().pause("keep").effective("keep").abort("r1", head={"r1": (0,)}).launch().land().holds(STEP)


def test_a_later_wait_runs_frozen_requests_to_their_end():
    log = running().pause("keep").effective("keep").pause("wait").launch(("r1", 2, 1)).land(r1=8)
    log.finish("r1", head=(0,)).deliver(r1="length").effective("wait")
    assert log.holds(STEP) and log.holds(QUIET)


def test_a_later_keep_lets_nothing_run():
    log = running().pause("keep").effective("keep").pause("keep").launch(("r1", 2, 1))
    assert log.violation(STEP).sentence == "step 2 was launched while paused by keep"


def test_nothing_runs_out_of_service():
    log = running().take_up(SwapWeights(source=NEW_WEIGHTS, fails=True)).add(UpdateStarted())
    log.add(UpdateFailed(phase="update", wrote=True, why="broke")).refuse("failed").step(("r1", 2, 1), r1=8)
    violation = log.violation(STEP)
    assert said(violation) == ("step 2 was launched while out of service", "no forward before a full update succeeds", "a step of [r1]")
    assert [(cause.seq, cause.what) for cause in violation.cause] == [(log.last(UpdateFailed), "update failed")]


def test_a_full_update_brings_steps_back():
    log = running().take_up(SwapWeights(source=NEW_WEIGHTS, fails=True)).add(UpdateStarted())
    log.add(UpdateFailed(phase="update", wrote=True, why="broke")).refuse("failed").swap("v2").step(("r1", 2, 1), r1=8)
    assert log.holds(STEP)


def test_a_pause_waits_for_the_step_in_flight():
    violation = running().launch(("r1", 2, 1)).pause("keep").effective("keep").violation(QUIET)
    assert said(violation) == ("the pause took effect with a step in flight", "every launched step has landed", "steps [2] in flight")
    assert [cause.what for cause in violation.cause] == ["launched step 2", "pause pending"]


def test_a_pause_waits_for_sampled_tokens():
    log = running().launch(("r1", 2, 1)).land(r1=8).pause("keep").effective("keep")
    assert said(log.violation(QUIET)) == (
        "the pause took effect before sampled tokens were handed out",
        "every sampled token delivered",
        "tokens of [r1] undelivered",
    )


def test_a_pause_waits_for_final_outputs():
    log = running().pause("abort").finish("r1", "abort", head=(0,)).effective("abort")
    assert said(log.violation(QUIET)) == (
        "the pause took effect before finished requests were handed out",
        "every finish reason delivered",
        "[r1] finished and undelivered",
    )


def test_a_call_returns_only_after_a_pause_took_effect():
    violation = running().pause("keep").answer().violation(QUIET)
    assert said(violation) == (
        "pause call 2 returned although no pause has taken effect since",
        "`pause_effective` between the call and its return",
        "none",
    )


def test_an_earlier_effect_does_not_count():
    log = running().pause("keep").effective("keep")
    effective = log.last(PauseEffective)
    log.take_up(Pause(mode="keep")).answer()
    violation = log.violation(QUIET)
    assert violation.got == f"the last one is event {effective}"
    assert [(cause.seq, cause.what) for cause in violation.cause] == [(log.last(Received), "pause call 3 taken up")]


def test_a_superseded_call_needs_no_effect():
    log = running().pause("wait").take_up(Pause(mode="keep", clear_cache=False)).refuse("superseded", op=2)
    assert log.add(PausePending(mode="keep", clear_cache=False)).effective("keep", ops=[3]).close("paused").holds(QUIET)


def test_an_empty_step_launched_before_the_last_forward_has_landed_is_within_the_bound():
    log = running().launch(("r1", 2, 1)).pause("keep").launch()
    log.add(Landed(step=2, sampled=(Sampled("r1", 8),))).launch()
    assert log.holds(QUIET)
    assert log.launch().violation(QUIET).sentence == "the keep pause is pending beyond the last forward that it waits for"


def test_one_step_after_the_last_forward_is_within_the_bound():
    log = running().pause("keep").launch(("r1", 2, 1)).land(r1=8).deliver().effective("keep")
    assert log.holds(QUIET)


def test_two_steps_are_beyond_the_bound():
    log = running().pause("keep").step(("r1", 2, 1), r1=8).launch(("r1", 3, 1))
    violation = log.violation(QUIET)
    assert said(violation) == (
        "the keep pause is pending beyond the last forward that it waits for",
        "at most one step after it",
        "step 3 is the second",
    )
    assert (violation.seq, violation.cause[0].what) == (log.last(Launched), "pause pending")


def test_wait_is_bound_from_the_last_end_on():
    log = running().pause("wait").step(("r1", 2, 1), r1=8).step(("r1", 3, 1), r1=9).launch(("r1", 4, 1)).land(r1=10)
    assert log.finish("r1", head=(0,)).deliver(r1="length").launch().land().holds(QUIET)
    assert log.launch().violation(QUIET).sentence == "the wait pause is pending beyond the last forward that it waits for"


def test_requests_parked_since_do_not_hold_a_wait_up():
    log = running().pause("wait").submit("r2", [30], parked=True).launch(("r1", 2, 1)).land(r1=8)
    log.finish("r1", head=(0,)).deliver(r1="length")
    assert log.launch().land().launch().violation(QUIET).got == "step 4 is the second"


def test_a_call_that_never_returned():
    log = running().pause("keep").take_up(Pause(mode="keep", clear_cache=False)).effective("keep").close("paused")
    assert said(log.violation(QUIET)) == (
        "pause call 2 never returned",
        "an answer or an error, as nothing is left to wait for",
        "no `returned`",
    )


def test_a_wait_with_requests_left_is_not_overdue():
    assert running().pause("wait").close("paused").holds(QUIET)


def test_an_update_while_running_is_not_out_of_service():
    log = running().add(UpdateStarted(), PartReceived(part=1, of=1, tensors=1, bytes=4)).step(("r1", 2, 1), r1=8)
    assert log.holds(STEP)


def test_each_end_may_be_told_by_an_empty_step_while_the_pause_is_pending():
    log = running().pause("abort").finish("r1", "abort", head=(0,)).deliver(r1="abort").launch().land()
    assert log.submit("r2", [30], parked=True).abort("r2").launch().land().holds(QUIET)
    assert log.launch().violation(QUIET).sentence == "the abort pause is pending beyond the last forward that it waits for"


def test_requests_that_came_since_do_not_hold_a_wait_up_though_they_run():
    log = running().pause("wait").submit("r2", [30]).launch(("r1", 2, 1)).land(r1=8)
    log.finish("r1", head=(0,)).deliver(r1="length").admit("r2", [0]).step(("r2", 0, 1), r2=7).step(("r2", 1, 1), r2=8)
    assert log.violation(QUIET).got == "step 4 is the second"


def test_a_later_wait_waits_for_those_that_came_before_it():
    log = running().pause("wait").submit("r2", [30], parked=True).pause("wait").launch(("r1", 2, 1)).land(r1=8)
    log.finish("r1", head=(0,)).deliver(r1="length").admit("r2", [0]).step(("r2", 0, 1), r2=7).step(("r2", 1, 1), r2=8)
    assert log.holds(QUIET)


def resumed_before_the_return() -> Timeline:
    return running().pause("keep").add(PauseEffective(mode="keep", clear_cache=False)).resume()


def test_a_pause_does_not_return_after_the_resume_that_ended_it():
    log = resumed_before_the_return().answer({"status": "paused"}, op=2)
    assert said(log.violation(QUIET)) == (
        "pause call 2 returned as paused after the engine had resumed",
        "the return as soon as the pause takes effect",
        f"event {log.last(Resumed)} between `pause_effective` and the return",
    )


def test_a_pause_does_not_return_after_a_step():
    log = resumed_before_the_return().launch(("r1", 2, 1)).answer({"status": "paused"}, op=2)
    assert log.violation(QUIET).sentence == "pause call 2 returned as paused after the engine had launched a step"


def test_a_client_in_another_process_may_hear_late_of_its_pause():
    log = resumed_before_the_return()
    log.add(log.entries[0].event).answer({"status": "paused"}, op=2)
    assert log.holds(QUIET)


def superseded(log: Timeline) -> tuple[str, str, str]:
    return said(log.violation(QUIET))


NOT_RETURNED = (
    "pause call 2 was superseded and did not return",
    "an error (superseded) within the call that overrides it",
    "no `returned`",
)


def test_a_resume_lets_pending_pauses_return():
    log = running().pause("wait").resume().step(("r1", 2, 1), r1=8)
    assert superseded(log.refuse("superseded", op=2)) == NOT_RETURNED


def test_a_keep_lets_the_wait_return_that_it_overrides():
    log = running().pause("wait").pause("keep").effective("keep").take_up(Resume())
    assert superseded(log.add(Resumed()).refuse("superseded", op=2)) == NOT_RETURNED


def test_a_superseded_pause_is_missed_at_the_end():
    log = running().pause("wait").take_up(Resume()).add(Resumed()).answer().close("stalled")
    assert superseded(log)[0] == NOT_RETURNED[0]


def test_a_superseded_pause_does_not_succeed():
    log = running().pause("wait").take_up(Pause(mode="keep", clear_cache=False)).add(PausePending(mode="keep", clear_cache=False))
    log.effective("keep", ops=[2, 3])
    assert superseded(log) == ("pause call 2 was superseded and returned as if it had been carried out", "an error: superseded", "success")


def test_a_pause_is_superseded_by_something():
    log = running().pause("keep").effective("keep", ops=()).refuse("superseded")
    assert superseded(log) == (
        "pause call 2 failed as superseded, and no call overrides it",
        "a later resume, or a later pause(keep) over a wait, being carried out",
        "neither",
    )


def test_a_wait_over_a_keep_overrides_nothing():
    log = running().pause("keep").take_up(Pause(mode="wait")).refuse("superseded", op=2)
    assert superseded(log)[0] == "pause call 2 failed as superseded, and no call overrides it"
