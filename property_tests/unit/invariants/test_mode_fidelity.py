"""mode-fidelity: what was asked for is what was done."""

from __future__ import annotations

from harness.events import Cleared, Delivered, Freed, Output, PausePending, Preempted, Stored
from harness.operations import Pause, ResetPrefixCache

from .logs import Timeline, said

ID = "mode-fidelity"


def running() -> Timeline:
    return Timeline().submit("r1", [20, 21]).admit("r1", [0]).step(("r1", 0, 2), r1=7)


def end(log: Timeline, token: int = 8) -> Timeline:
    """r1 ends by the token of a step."""
    return log.launch(("r1", 2, 1)).land(r1=token).finish("r1", head=(0,)).deliver(r1="length")


def told(log: Timeline) -> Timeline:
    return log.add(Delivered(outputs=(Output("r1", 1, (), "abort"),)))


def test_abort_ends_all():
    log = running().pause("abort", clear_cache=True).finish("r1", "abort", head=(0,))
    assert told(log).cleared().effective("abort", clear_cache=True).holds(ID)


def test_abort_leaves_none_alive():
    violation = running().pause("abort").effective("abort").violation(ID)
    assert said(violation) == ("pause(abort) returned with requests alive", "all 1 requests accepted before the call finished", "[r1] live")
    assert [cause.what for cause in violation.cause] == ["pause(abort) taken up"]


def test_abort_does_not_answer_for_late_requests():
    log = running().pause("abort").finish("r1", "abort", head=(0,))
    assert told(log).effective("abort").submit("r2", [30], parked=True).close("paused").holds(ID)


def test_wait_runs_all_to_their_end():
    assert end(running().pause("wait")).effective("wait").holds(ID)


def test_wait_leaves_none_unfinished():
    violation = running().pause("wait").effective("wait").violation(ID)
    assert said(violation) == (
        "pause(wait) returned with requests unfinished",
        "all 1 requests accepted before the call finished",
        "[r1] live",
    )


def test_wait_aborts_none():
    violation = told(running().pause("wait").finish("r1", "abort", head=(0,))).effective("wait").violation(ID)
    assert said(violation) == (
        "r1 was aborted under pause(wait), and nobody asked for that",
        "an end by a client's abort or a pause(abort) after the request came",
        "finish reason abort",
    )


def test_a_wait_that_an_abort_overrides_is_an_abort():
    log = running().pause("wait").pause("abort").finish("r1", "abort", head=(0,))
    assert told(log).effective("abort", ops=[2, 3]).holds(ID)


def test_keep_freezes():
    assert running().pause("keep").effective("keep").holds(ID)


def test_keep_ends_none_by_a_later_step():
    violation = end(running().pause("keep")).effective("keep").violation(ID)
    assert said(violation) == (
        "r1 ended under pause(keep) by a token of a step launched after the call",
        "frozen where it was",
        "finish reason length",
    )
    assert [cause.what for cause in violation.cause] == ["pause(keep) taken up", "launched step 2"]


def test_a_step_launched_before_keep_may_end_a_request():
    log = running().launch(("r1", 2, 1)).pause("keep").land(r1=8).finish("r1", head=(0,)).deliver(r1="length")
    assert log.effective("keep").holds(ID)


def test_a_client_may_abort_a_frozen_request():
    assert running().pause("keep").effective("keep").abort("r1", head={"r1": (0,)}).holds(ID)


def test_a_later_wait_ends_what_keep_froze():
    assert end(running().pause("keep").effective("keep").pause("wait")).effective("wait").holds(ID)


def test_a_later_abort_ends_what_keep_froze():
    log = running().pause("keep").effective("keep").pause("abort").finish("r1", "abort", head=(0,))
    assert told(log).effective("abort").holds(ID)


def test_a_later_keep_does_not_allow_an_end():
    assert end(running().pause("keep").pause("keep")).violation(ID).cause[0].what == "pause(keep) taken up"


def test_a_step_launched_for_a_wait_between_two_keeps_may_end_a_request():
    log = running().pause("keep").pause("wait").launch(("r1", 2, 1)).pause("keep").refuse("superseded", op=3)
    log.land(r1=8).finish("r1", head=(0,)).deliver(r1="length")
    assert log.effective("keep", ops=[2, 4]).holds(ID)


def test_frozen_requests_are_not_aborted_on_the_way_to_resume():
    violation = told(running().pause("keep").effective("keep").finish("r1", "abort", head=(0,))).violation(ID)
    assert violation.sentence == "r1 was aborted under pause(keep), and nobody asked for that"
    assert [cause.what for cause in violation.cause] == ["r1 came", "pause(keep) taken up"]


def test_late_requests_are_not_aborted_by_an_earlier_abort():
    log = running().pause("abort").finish("r1", "abort", head=(0,))
    told(log).effective("abort").submit("r2", [30], parked=True).finish("r2", "abort")
    assert log.violation(ID).sentence == "r2 was aborted under pause(abort), and nobody asked for that"


def test_after_resume_requests_end_as_ever():
    assert end(running().pause("keep").effective("keep").resume()).holds(ID)


def test_a_superseded_call_is_not_judged():
    log = running().pause("wait", clear_cache=True).take_up(Pause(mode="keep", clear_cache=False)).refuse("superseded", op=2)
    assert log.add(PausePending(mode="keep", clear_cache=False)).effective("keep", ops=[3]).holds(ID)


def test_a_mode_that_was_not_asked_for():
    violation = running().pause("keep").effective("wait").violation(ID)
    assert said(violation) == ("a pause took effect in a mode that was not asked for", "keep", "wait")


def test_clear_empties_the_cache():
    log = running().pause("keep", clear_cache=True).add(Preempted(request="r1", by=None), Freed(request="r1", head=(0,), tail=()))
    assert log.cleared().effective("keep", clear_cache=True).holds(ID)


def test_clear_that_was_not_carried_out():
    violation = running().pause("keep", clear_cache=True).effective("keep", clear_cache=True).violation(ID)
    assert said(violation) == (
        "a pause with clear_cache=True took effect and the cache had not been emptied",
        "a `cleared` with success and empty, after the call and the last step",
        "none",
    )


def test_a_refused_clear_is_no_clear():
    log = running().pause("keep", clear_cache=True).add(Cleared(tier="device", success=False, empty=False))
    assert log.effective("keep", clear_cache=True).violation(ID).got == "none"


def test_a_clear_before_the_call_does_not_count():
    log = running().abort("r1", head={"r1": (0,)}).reset().pause("keep", clear_cache=True).effective("keep", clear_cache=True)
    assert log.violation(ID).got == "none"


def test_a_step_after_the_clear_undoes_it():
    log = running().pause("wait", clear_cache=True).cleared()
    cleared = log.last(Cleared)
    assert end(log).effective("wait", clear_cache=True).violation(ID).got == f"the last one is event {cleared}, before a step"


def test_clear_from_either_call_wins():
    log = running().pause("wait", clear_cache=True).pause("wait")
    violation = end(log).cleared().effective("wait", clear_cache=False, ops=[2, 3]).violation(ID)
    assert said(violation) == (
        "a pause took effect with another cache policy than its calls asked for",
        "clear_cache=True",
        "clear_cache=False",
    )


def test_no_clear_that_no_call_asked_for():
    violation = running().pause("keep").cleared().effective("keep").violation(ID)
    assert said(violation) == (
        "the cache was cleared under pause(keep), and no call asked for that",
        "the cache kept: clear_cache=False",
        "a clear",
    )


def test_no_preemption_that_no_call_asked_for():
    log = running().pause("keep").add(Preempted(request="r1", by=None), Freed(request="r1", head=(0,), tail=()))
    assert log.effective("keep").violation(ID).sentence == (
        "r1 was preempted by a cache reset under pause(keep), and no call asked for that"
    )


def test_a_reset_may_clear_under_a_pause():
    log = running().pause("keep").effective("keep").take_up(ResetPrefixCache())
    log.add(Preempted(request="r1", by=None), Freed(request="r1", head=(0,), tail=()))
    assert log.cleared().answer().holds(ID)


def test_a_pending_wait_runs_none_that_came_after_it():
    log = running().pause("wait").submit("r2", [30], parked=True).admit("r2", [1]).step(("r1", 2, 1), ("r2", 0, 1), r1=8, r2=7)
    violation = log.step(("r1", 3, 1), ("r2", 1, 1), r1=9, r2=8).violation(ID)
    assert said(violation) == (
        "step 2 runs r2 under a pending pause(wait) that it came after",
        "only those accepted before the call: [r1]",
        "a step of [r1, r2]",
    )
    assert [cause.what for cause in violation.cause] == ["pause(wait) taken up", "r2 came"]


def test_a_wait_that_joins_a_wait_runs_those_that_came_in_between():
    log = running().pause("wait").submit("r2", [30], parked=True).pause("wait").admit("r2", [1])
    assert log.step(("r1", 2, 1), ("r2", 0, 1), r1=8, r2=7).holds(ID)


def test_a_running_engine_clears_nothing_unasked():
    violation = reset_by_itself(running()).violation(ID)
    assert said(violation) == (
        "r1 was preempted by a cache reset, and no call asked for that",
        "the cache kept until a pause or a reset clears it",
        "a clear",
    )


def test_a_kept_cache_is_not_cleared_after_resume():
    log = running().pause("keep").effective("keep").resume()
    assert reset_by_itself(log).violation(ID).sentence == "r1 was preempted by a cache reset, and no call asked for that"


def test_a_clear_that_was_carried_out_does_not_allow_another():
    log = running().pause("abort", clear_cache=True).finish("r1", "abort", head=(0,))
    told(log).cleared().effective("abort", clear_cache=True).resume()
    assert log.cleared().violation(ID).sentence == "the cache was cleared, and no call asked for that"


def reset_by_itself(log: Timeline) -> Timeline:
    return log.add(Preempted(request="r1", by=None), Freed(request="r1", head=(0,), tail=())).cleared()


def test_a_clear_that_leaves_blocks_held_is_none():
    log = running().pause("keep", clear_cache=True).cleared()
    violation = log.effective("keep", clear_cache=True).violation(ID)
    assert said(violation) == (
        "a pause with clear_cache=True took effect and the cache is not empty, although its reset said so",
        "no block held and no digest left",
        "blocks [0]",
    )
    assert violation.cause[-1].seq == log.last(Cleared)


def test_a_clear_that_leaves_a_digest_is_none():
    log = running().pause("keep", clear_cache=True).add(Preempted(request="r1", by=None)).cleared()
    log.add(Stored(request="r1", blocks=((0, 0),)), Freed(request="r1", head=(), tail=(0,)))
    assert log.effective("keep", clear_cache=True).violation(ID).got == "blocks [0]"
